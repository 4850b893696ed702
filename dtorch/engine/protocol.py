"""What the client and a worker say to each other: flat lists that msgpack can write.

The client sends *batches* of commands, the same to every worker, numbered from 0 without a gap. A command whose first item is
a program id runs that program: ``[program, *input values, *output values, *operands]``. Programs, values and meshes are named by
integers that the client counts up; smaller first items are the commands below. A worker runs the commands in order, and skips
what does not concern its device. Commands are numbered too (the *sequence number*), which is how an error finds its line.
"""

from __future__ import annotations

FREE = 0
"""``[FREE, *values]``: forget these values."""
DEFINE = 1
"""``[DEFINE, program id, program]``: a `dtorch.program.ir.Program`, msgpack-encoded bytes."""
MESH = 2
"""``[MESH, mesh id, device type, shape, device ids, dim names or None]``."""
PUT = 3
"""``[PUT, value, mesh id, placements, shape, dtype, blob]``: every device keeps its box of a whole tensor from the client.
``blob`` is the tensor's bytes (contiguous), or ``[offset, bytes]`` in the client's arena, or ``[offset, bytes, offset of the ring, slabs
shown before]``: it comes through the ring (`dtorch.worker.comm.ring`). Under Partial, coordinate 0 holds it all."""
GET = 4
"""``[GET, token, value, mesh id, placements, shape, dtype, landing]``: one device of each distinct box replies with it.
The placements hold no Partial. A device whose tensor is not of that box or dtype fails: its bytes would be read as something else.
``landing`` is ``[offset, bytes]`` in the client's arena, where a whole contiguous tensor lies into which each device copies its box
(the reply then carries None), or None: the reply carries the box's bytes."""
DESCRIBE = 5
"""``[DESCRIBE, token, mesh id, *values]``: the mesh's first device replies with ``[shape, stride, dtype]`` of each."""
SYNC = 6
"""``[SYNC, token]``: every worker replies with None."""
STATS = 7
"""``[STATS, token, reset peak]``: every worker replies with ``{"live": bytes, "peak": bytes, "values": count}``."""
IMPORT = 8
"""``[IMPORT, module name]``: import a module that registers custom ops."""
THREADS = 9
"""``[THREADS, count]``: torch threads per worker."""
SHARDS = 10
"""``[SHARDS, token, value, mesh id]``: every device of the mesh replies with ``[shape, dtype, bytes]`` of what it holds."""
DEFAULT_DTYPE = 11
"""``[DEFAULT_DTYPE, dtype]``: what ``torch.get_default_dtype`` says from here on, which ops of integers go by."""
TRACE = 12
"""``[TRACE, token, what]``: ``"start"`` noting when each command runs (nothing happens where that is on), ``"read"`` what was noted,
``"stop"``. Every worker replies with what `dtorch.worker.tracing.Tracer.report` gives. It concerns the batches after its own."""
FIRST_PROGRAM = 16
"""Program ids count up from here."""

# A worker's events: ``[kind, device id, ...]``.
READY = 0
"""``[READY, device, pid]``."""
REPLY = 1
"""``[REPLY, device, token, payload]``."""
FAILED = 2
"""``[FAILED, device, sequence number, error type, message, coordinate or None, local shapes]``: sent once, when a command fails."""
POISONED = 3
"""``[POISONED, device, token, (failing device, its sequence number)]``: instead of a reply whose value depends on a failed command."""
