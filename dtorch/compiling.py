"""``dtorch.compile``: a function recorded, and run with one command."""

from __future__ import annotations

import copy
import functools
import os
import shutil
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from . import hints
from .capture.plain import Mismatch
from .client import lines, runtime, torch_internals, watch
from .errors import DTorchError

#: Recordings of one function that are kept.
RECORDINGS = 8
#: Recordings of calls with one key that may be of no use to the next call, as the first step of an optimizer is.
PASSING = 3
#: What is said of the options of ``torch.compile``.
OPTIONS = '; torch.compile\'s options do not apply here: there are backend="inductor" and verify=True'


@functools.partial(hints.takes, note=OPTIONS)
def compile(function: Any = None, *, backend: str | None = None, verify: bool = False) -> Any:
    """A function or module whose calls are recorded, and run with one command to the workers from then on (one for each mesh in turn).

    The contract of ``jax.jit`` and of CUDA graphs. The first call with new argument specs, Python arguments, modes of torch (grad,
    inference, autocast, default dtype, train and eval) or specs of tensors outside is run and recorded; later calls run the program.

    - *Read at every call*: arguments, and tensors outside of the function, in modules, closures, globals, optimizers, and ``.grad``, by
      where they are. A tensor of another kind in such a place is another recording. Plain tensors among them are sent anew each time.
    - *Written by every call*: tensors in place, ``.data``, attributes, dict and list items, ``.grad``, optimizers' state.
    - *Inside*: ``backward()``; ``optimizer.step()``, whose learning rates and counts the optimizer itself works out at each call; random
      numbers, which go on as they would; work on plain tensors, done again where it depends on an argument.
    - *Gradients*: with grad mode on, results carry one autograd node, whose backward is a program too. It is made for all results, and
      for the scalars alone; it cannot be differentiated again. The backward runs once more while recording.
    - *One all-reduce* completes the small sums of a program that nothing is waiting for, as the gradients of data-parallel training are.
    - *Baked in*: Python state, but for arguments and for which children, parameters and buffers modules have: what is in lists, a None
      elsewhere that becomes a tensor. ``verify=True`` finds what depends on it.
    - *A value read inside* (``if loss > 9``, ``int(x.sum())``) splits the program: each call runs up to there, waits for the value, and
      goes on as was recorded for that value. Recordings are told apart by truth values, ints and whole floats.
    - *Run op by op*, with one warning that names the line: a function that reads other values (``loss.item()`` to print it, whole tensors),
      or any after it has written in place what is outside; shapes that depend on values; a scheduler inside;
      tensors from, or kept, where this cannot see; TorchScript modules; plain tensors that require gradients; tensors of numpy
      arrays; lists and dicts that it is given and changes; ``random="torch"`` with random ops; what is new once a function has been
      recorded eight times. Calls under ``torch.func``, ``torch.device``, hooks of saved tensors (as in a checkpoint that is not
      reentrant) and the like run op by op too.
    - A failure on a worker fails everything that the call makes or writes from there on.

    Inside a call that is being recorded, another compiled function is part of it. Threads may share one.

    Args:
        function: a function, a method or an ``nn.Module``. Without it, a decorator.
        backend: what the workers run the program with: torch's kernels one by one (None), or, with ``"inductor"``, functions that
            torch's inductor compiles from the ops between two that communicate, write in place or draw random numbers, at the second
            run of each. That takes seconds, the C++ compiler that ``CXX`` names (or g++), and Triton on cuda devices. Elements may be
            rounded otherwise: intermediate results of bfloat16 and float16 stay float32, and products and sums may be fused.
        verify: record every call again and compare; nothing is faster then.

    Returns:
        `Compiled`, called as the function is. What it does not have itself is the function's: ``compiled.parameters()``.

    Raises:
        TypeError: what is given cannot be called.
        ValueError: there is no such ``backend``.
        RuntimeError: with ``backend="inductor"``, there is no C++ compiler.
        DTorchError: with ``verify``, a call does something else than was recorded.

    Example::

        >>> mesh = DeviceMesh("cpu", [0, 1])
        >>> weight = dtorch.ones(4, 4, device_mesh=mesh, placements=[Shard(0)])
        >>> step = compile(lambda x: (x @ weight).relu())
        >>> x = dtorch.ones(2, 4, device_mesh=mesh)
        >>> step(x).sum().item(), step(x + 1).sum().item()  # recorded, then run
        (32.0, 64.0)
    """
    if function is None:
        return functools.partial(compile, backend=backend, verify=verify)
    if not callable(function):
        raise TypeError(f"compile(): expected a function or a module, got {type(function).__name__}")
    _check_backend(backend)
    if isinstance(function, Compiled):
        if (function.verify, function.backend) == (verify, backend):
            return function
        function = function.function  # compiled otherwise
    return Compiled(function, verify, backend)


def _check_backend(backend: str | None) -> None:
    if backend not in (None, "inductor"):
        raise ValueError(f'compile(): backend must be None or "inductor", got {backend!r}')
    compiler = os.environ.get("CXX", "g++")
    if backend == "inductor" and shutil.which(compiler) is None:
        raise RuntimeError(
            f"compile(): backend=\"inductor\" needs a C++ compiler on every worker's machine, and {compiler!r} is not on this one's PATH; "
            "install g++, name another in the environment variable CXX, or leave backend out"
        )


class Compiled:
    """What `compile` gives. ``program`` is what was recorded last, for people: print it."""

    def __init__(self, function: Callable[..., Any], verify: bool = False, backend: str | None = None) -> None:
        self.function = function
        self.backend = backend
        self.verify = verify
        self.program: Any = None
        self._name = getattr(function, "__qualname__", type(function).__name__)
        #: What was recorded, by what calls must share.
        self._found: dict[Any, Any] = {}
        #: Those of them that know their calls at sight.
        self._alike: list[Any] = []
        self._passing: dict[Any, int] = {}
        self._eager: set[Any] = set()
        self._keys: list[Any] = []
        self._warned = False
        self._lock = threading.Lock()
        _ALL.add(self)
        if not isinstance(function, torch.nn.Module):
            functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if watch.recorder() is not None or torch_internals.is_intercepted(runtime.chosen_mesh() is not None):
            return self.function(*args, **kwargs)
        tried = None
        for alike in self._alike:
            tensors = alike.match(args, kwargs)
            if tensors is not None:
                try:
                    return alike.run(tensors)
                except Mismatch:
                    tried = alike
                break
        return self._by_key(args, kwargs, tried)

    def _by_key(self, args: Any, kwargs: Any, tried: Any) -> Any:
        """A call that is not known at once. ``tried``: recordings that have been found not to be like it."""
        from .capture.arguments import Arguments, Unsupported

        try:
            arguments = Arguments(args, kwargs)
        except Unsupported as error:
            self._warn(str(error))
            return self.function(*args, **kwargs)
        key = arguments.key
        if key in self._eager:
            return self.function(*args, **kwargs)
        known = self._found.get(key)
        if known is not None and known is not tried and not self.verify:
            try:
                return known.run(arguments.tensors)
            except Mismatch:
                pass
        return self._record(args, kwargs, arguments)

    def _record(self, args: Any, kwargs: Any, arguments: Any) -> Any:
        from .capture.alike import match_of
        from .capture.record import Recording

        key = arguments.key
        if len(self._keys) >= RECORDINGS and not self.verify:
            self._warn(
                f"it has been recorded {RECORDINGS} times, and is run as it is for what is new; what varies is {self._varying(key)}"
            )
            return self.function(*args, **kwargs)
        known = self._found[key].captured if self.verify and key in self._found else ()
        alike = [captured for captured in known if captured.matches(arguments.tensors)]
        is_new = not self.verify and key not in self._found
        match = match_of(args, kwargs) if is_new else None  # now: the call may change its arguments
        made = Recording(
            self.function, self._name, args, kwargs, arguments, backend=self.backend, keeps_constants=self.verify
        )
        read = tuple(read.found for read in made.recorder.reads)
        expected = next((captured for captured in alike if captured.begins(read)), None)
        if expected is not None:
            self._compare(expected, made)
            return made.result
        with self._lock:
            if made.captured is not None:
                self._keep(key, made.captured, match)
            elif made.refused is not None:
                self._give_up(key, made.refused)
            else:
                self._passing[key] = self._passing.get(key, 0) + 1
                if self._passing[key] >= PASSING:
                    self._give_up(key, made.passing)
        return made.result

    def _varying(self, key: Any) -> str:
        """What is another in this call, of this key, than in the last recordings, for people. What differed before may be settled."""
        from .capture import varying

        found = self._found.get(key)
        return (
            varying.reads(self._found[self._keys[-1]].captured)
            or varying.arguments(self.function, [*self._keys[-2:], key])
            or (varying.outside(found.captured[0]) if found is not None else "")
            or "what it reads from outside (modules, closures, globals)"
        )

    def _compare(self, expected: Any, made: Any) -> None:
        """Raise if a call that was recorded again did something else."""
        found = made.refused or made.passing
        if made.captured is not None:
            found = expected.difference(made.captured)
        if found is not None:
            raise DTorchError(
                f"dtorch.compile(verify=True): {self._name} does not do what was recorded, so it depends on Python state that is "
                f"neither an argument nor a tensor: {found}"
            )

    def _keep(self, key: Any, captured: Any, match: Any) -> None:
        from .capture.alike import Alike

        self._keys.append(key)
        if key not in self._found:
            self._found[key] = Alike(match, self._lock)
            if match is not None:
                self._alike = [self._found[key], *self._alike]
        self._found[key].captured.insert(0, captured)
        self._passing.pop(key, None)
        self.program = captured

    def _give_up(self, key: Any, reason: Any) -> None:
        self._eager.add(key)
        self._alike = [alike for alike in self._alike if alike is not self._found.get(key)]
        self._warn(str(reason))

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            lines.warn(f"dtorch.compile: {self._name} is run op by op: {reason}")

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name == "function":
            raise AttributeError(name)
        return getattr(self.function, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN or name.startswith("__"):
            object.__setattr__(self, name, value)
        else:
            setattr(self.function, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.function, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = copy.deepcopy(self.function, memo)
        return self if copied is self.function else Compiled(copied, self.verify, self.backend)

    def __reduce__(self) -> Any:
        if isinstance(self.function, types.FunctionType):
            return self.function.__qualname__  # as pickle takes functions, by name
        return Compiled, (self.function, self.verify, self.backend)

    def __repr__(self) -> str:
        return f"<dtorch.compile of {self.function!r}: {len(self._keys)} recordings>"

    def _forget(self) -> None:
        """The cluster is gone, and its programs with it."""
        with self._lock:
            for known in (self._found, self._passing, self._eager, self._keys):
                known.clear()
            self._alike = []
            self.program = None


#: A `Compiled`'s own attributes; the others are its function's.
_OWN = frozenset(
    (
        "function",
        "verify",
        "backend",
        "program",
        "_name",
        "_found",
        "_alike",
        "_passing",
        "_eager",
        "_keys",
        "_warned",
        "_lock",
    )
)

_ALL: weakref.WeakSet[Compiled] = weakref.WeakSet()


def _forget_all() -> None:
    for compiled in list(_ALL):
        compiled._forget()


runtime.on_close.append(_forget_all)
