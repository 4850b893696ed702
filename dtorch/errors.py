"""The exceptions dtorch raises beyond Python's and torch's own."""


class DTorchError(RuntimeError):
    """Base of every error that is dtorch's own."""


class WorkerLost(DTorchError):
    """A worker process died, or stopped taking part; the cluster must be started anew."""


class RemoteError(DTorchError):
    """An operation failed on a worker; the message names the op, shapes, coordinates and the user's line.

    It is also an instance of what torch raises for it on one device (``IndexError``, ``ValueError``, ``torch.linalg.LinAlgError``, …).
    """


class MeshMismatch(DTorchError, ValueError):
    """Tensors on different meshes met in one op."""


class DeviceUnavailable(DTorchError):
    """A device that was asked for does not exist or cannot be started here."""


class ImplicitCommunication(DTorchError):
    """A redistribution that the user did not ask for, under the setting that forbids them."""
