"""`io.load` and `io.save`: any mesh to any mesh through files that the library and plain torch read bit-equal."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dtorch
from dtorch import DeviceMesh, Replicate, Shard, distribute_module
from dtorch.io import load, save, transfers

pytestmark = pytest.mark.usefixtures("engine")

TWO = DeviceMesh("cpu", [0, 1])
THREE = DeviceMesh("cpu", [0, 1, 2])
GRID = DeviceMesh("cpu", [[0, 1], [2, 3]], ("dp", "tp"))

#: A mesh and a plan: whole, in rows and columns, uneven, with empty parts, cut twice along one dim and along two.
PLACES: dict[str, tuple[DeviceMesh, dict[str, Any]]] = {
    "whole": (TWO, {}),
    "rows": (THREE, {"*": [Shard(0)]}),
    "columns": (TWO, {"*weight": [Shard(1)]}),
    "tp": (GRID, {"*": {"tp": Shard(0)}}),
    "twice": (GRID, {"*": [Shard(0), Shard(0)]}),
    "both": (GRID, {"*weight": [Shard(1), Shard(0)], "*bias": [Shard(0), Replicate()]}),
}


class Net(torch.nn.Module):
    """Uneven sizes, several dtypes, a tensor without dims and one without elements, a buffer that is not saved, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 5)
        self.up = torch.nn.Linear(5, 3)
        self.narrow = torch.nn.Parameter(torch.randn(3, 4).bfloat16())
        self.scale = torch.nn.Parameter(torch.randn(()))
        self.nothing = torch.nn.Parameter(torch.empty(0, 3))
        self.register_buffer("table", torch.arange(11))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def values(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value.to_torch() if isinstance(value, dtorch.Tensor) else value
        for name, value in module.state_dict().items()
    }


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype
        assert torch.equal(actual[name], value), name


@pytest.mark.parametrize("place", PLACES)
def test_saved_anywhere_reads_as_plain(place: str, tmp_path: Path) -> None:
    plain = net()
    there = distribute_module(copy.deepcopy(plain), *PLACES[place])
    written = save(there, tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    expected = {name: value for name, value in plain.state_dict().items() if name != "head.weight"}
    assert_equal(found, expected)
    assert sum(written.values()) == sum(value.nbytes for value in expected.values())  # of replicas one writes


@pytest.mark.parametrize("target", PLACES)
def test_saved_on_one_mesh_loaded_on_any(target: str, tmp_path: Path) -> None:
    plain = net()
    save(distribute_module(copy.deepcopy(plain), *PLACES["both"]), tmp_path / "ckpt", max_shard_size=64)
    there = distribute_module(net(1), *PLACES[target])
    kept = [id(p) for p in there.parameters()]
    placements = {name: p.placements for name, p in there.named_parameters()}
    done = load(there, tmp_path / "ckpt")
    assert done.missing_keys == done.unexpected_keys == []
    assert_equal(values(there), plain.state_dict())
    assert there.head.weight is there.embed.weight
    assert kept == [id(p) for p in there.parameters()]
    assert placements == {name: p.placements for name, p in there.named_parameters()}


def test_made_on_the_meta_device(tmp_path: Path) -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        there = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
    distribute_module(there, TWO, {"0.weight": [Shard(0)]})
    load(there, tmp_path)
    assert_equal(values(there), plain.state_dict())
    x = torch.randn(3, 6)
    torch.testing.assert_close(there(dtorch.distribute_tensor(x, TWO)).to_torch(), plain(x))


def test_each_device_reads_only_what_it_holds(tmp_path: Path) -> None:
    plain = torch.nn.Linear(64, 32, bias=False)
    save_file(plain.state_dict(), tmp_path / "a.safetensors")
    for placements, share in {Shard(0): 2, Shard(1): 2, Replicate(): 1}.items():
        there = distribute_module(torch.nn.Linear(64, 32, bias=False), TWO, {"weight": [placements]})
        read = load(there, tmp_path / "a.safetensors").bytes_read
        assert read == {torch.device("cpu", i): 64 * 32 * 4 // share for i in range(2)}


def test_plain_and_uncommitted_tensors(tmp_path: Path) -> None:
    plain = net()
    save(plain, tmp_path / "x.safetensors")
    other = net(1)
    assert load(other, tmp_path / "x.safetensors").bytes_read == {
        "client": sum(v.nbytes for n, v in plain.state_dict().items() if n != "head.weight")
    }
    assert_equal(values(other), plain.state_dict())
    mixed = torch.nn.ParameterDict({"placed": dtorch.zeros(4, 3, device_mesh=TWO, placements=[Shard(0)])})
    mixed["uncommitted"] = torch.nn.Parameter(dtorch.zeros(4, 3))
    mixed["plain"] = torch.nn.Parameter(torch.zeros(4, 3))
    expected = {name: torch.randn(4, 3) for name in mixed}
    save_file(expected, tmp_path / "mixed.safetensors")
    load(mixed, tmp_path / "mixed.safetensors")
    assert_equal(values(mixed), expected)
    assert mixed["uncommitted"]._spec is None
    save(mixed, tmp_path / "again.safetensors")
    assert_equal(load_file(tmp_path / "again.safetensors"), expected)


def test_dtypes_are_converted_as_torch_does(tmp_path: Path) -> None:
    source = {"w": torch.randn(5, 3, dtype=torch.float64), "n": torch.arange(4, dtype=torch.int16), "f": torch.randn(3)}
    save_file(source, tmp_path / "x.safetensors")
    kinds = {"w": torch.bfloat16, "n": torch.float32, "f": torch.float8_e4m3fn}
    there = torch.nn.Module()
    for name, value in source.items():
        there.register_buffer(name, dtorch.zeros(value.shape, device_mesh=TWO, placements=[Shard(0)]).to(kinds[name]))
    load(there, tmp_path / "x.safetensors")
    for name, value in source.items():
        found = getattr(there, name)
        assert found.dtype == kinds[name]
        assert torch.equal(found.to_torch().double(), value.to(kinds[name]).double())


def test_every_dtype_of_the_format(tmp_path: Path) -> None:
    from dtorch.io.formats import DTYPES

    source = {}
    for name, dtype in DTYPES.items():
        bits = torch.arange(8 * dtype.itemsize, dtype=torch.uint8) % 2
        source[name] = bits.view(dtype) if dtype is not torch.bool else bits.bool()
    placed = {n: dtorch.distribute_tensor(v, TWO, [Shard(0)]) for n, v in source.items()}
    save(placed, tmp_path / "x.safetensors")
    found = load_file(tmp_path / "x.safetensors")
    for name, value in source.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name


def test_writes_in_place(tmp_path: Path) -> None:
    """As load_state_dict: views see it, autograd notices, other strides and pending sums are right."""
    base = dtorch.zeros(4, 6, device_mesh=TWO, placements=[Shard(0)])
    turned = dtorch.zeros(6, 4, device_mesh=TWO, placements=[Shard(1)]).t()
    pending = dtorch.ones(4, 6, device_mesh=TWO).redistribute(placements=[dtorch.Partial()])
    columns = base[:, 1:3]
    module = torch.nn.Module()
    for name, tensor in {"base": base, "turned": turned, "pending": pending}.items():
        module.register_buffer(name, tensor)
    expected = {name: torch.randn(4, 6) for name in ("base", "turned", "pending")}
    save_file(expected, tmp_path / "x.safetensors")
    weight = torch.nn.Parameter(torch.ones(()))
    loss = (base * weight).sum()
    version = base._version
    load(module, tmp_path / "x.safetensors")
    assert_equal(values(module), expected)
    assert pending.placements == [dtorch.Partial()]
    assert torch.equal(columns.to_torch(), expected["base"][:, 1:3])
    assert base._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_pending_sums_are_completed(tmp_path: Path) -> None:
    x = torch.randn(4, 3)
    save({"x": dtorch.distribute_tensor(x, TWO, [dtorch.Partial()])}, tmp_path / "x.safetensors")
    assert torch.equal(load_file(tmp_path / "x.safetensors")["x"], x)


def test_tied_weights_under_any_name(tmp_path: Path) -> None:
    plain = net()
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    for left_out in ("head.weight", "embed.weight"):
        save_file({n: v for n, v in state.items() if n != left_out}, tmp_path / "x.safetensors")
        there = distribute_module(net(1), *PLACES["rows"])
        load(there, tmp_path / "x.safetensors")
        assert_equal(values(there), state)


def test_sharded_files(tmp_path: Path) -> None:
    tensors = {f"layer.{i}": torch.randn(10) for i in range(5)}
    save({n: dtorch.distribute_tensor(t, TWO, [Shard(0)]) for n, t in tensors.items()}, tmp_path, max_shard_size=90)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 200
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    found: dict[str, torch.Tensor] = {}
    for file in set(index["weight_map"].values()):
        found |= load_file(tmp_path / file)
    assert_equal(dict(sorted(found.items())), tensors)


# -- what is replaced ------------------------------------------------------------------------------------------------------


def test_a_folder_is_replaced_at_once(tmp_path: Path) -> None:
    """Other files stay, parts of the old checkpoint do not, and nothing else is left."""
    folder = tmp_path / "ckpt"
    save({f"{i}": torch.ones(10) for i in range(4)}, folder, max_shard_size=40)
    (folder / "config.json").write_text("{}")
    (folder / "sub").mkdir()
    (folder / "sub" / "more.txt").write_text("more")
    (folder / "nowhere").symlink_to("nothing")
    os.mkfifo(folder / "pipe")  # opening it would wait for a writer
    save({"only": torch.zeros(3)}, folder)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors", "nowhere", "pipe", "sub"]
    assert (folder / "sub" / "more.txt").read_text() == "more"
    assert os.listdir(tmp_path) == ["ckpt"]


@pytest.mark.parametrize("name", ["ckpt", "one.safetensors"])
def test_a_failed_save_changes_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"x": torch.ones(3)}, tmp_path / name)
    bad = dtorch.ones(4, device_mesh=TWO, placements=[Shard(0)])[dtorch.tensor([9], device_mesh=TWO)]
    with pytest.raises(dtorch.errors.RemoteError, match="out of bounds"):
        save({"x": torch.zeros(3), "bad": bad}, tmp_path / name)
    monkeypatch.setattr(os, "posix_fallocate", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match=r"No space left on device: \d+ bytes are needed: .*\.partial"):
        save({"x": torch.zeros(3)}, tmp_path / name)
    there = torch.nn.Module()
    there.register_buffer("x", torch.zeros(3))
    load(there, tmp_path / name)
    assert torch.equal(there.x, torch.ones(3))
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_a_save_that_was_given_up_still_fails_at_is_told_to_nobody(
    interrupted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file goes while workers write. They fail at tensors of their own: of replicas the first device writes."""
    write, settle = transfers.in_place.run, transfers.Tally.finish

    def run(name: str, tensors: Any, arguments: Any, written: Any) -> None:
        if name == "dtorch.write_part":
            Path(os.fsdecode(arguments[0])).unlink(missing_ok=True)
        write(name, tensors, arguments, written)

    def finish(tally: Any) -> Any:
        if interrupted:
            raise KeyboardInterrupt
        return settle(tally)

    monkeypatch.setattr(transfers.in_place, "run", run)
    monkeypatch.setattr(transfers.Tally, "finish", finish)
    tensors = {
        "a": dtorch.ones(4, device_mesh=TWO),
        "b": dtorch.ones(4, device_mesh=TWO, placements=[Shard(0)]),
    }
    with pytest.raises(KeyboardInterrupt if interrupted else dtorch.errors.RemoteError):
        save(tensors, tmp_path / "one.safetensors")
    dtorch.synchronize()
    assert os.listdir(tmp_path) == []


def test_a_killed_save_leaves_the_old_and_the_next_cleans_up(tmp_path: Path, engine: str) -> None:
    if engine == "processes":
        pytest.skip("the script is the same")
    save({"x": torch.ones(3)}, tmp_path / "ckpt")
    script = (
        "import os, sys, torch, dtorch.io, dtorch.io.transfers as t\n"
        "t.write = lambda *a: os._exit(1)\n"
        "dtorch.io.save({'x': torch.zeros(3)}, sys.argv[1])\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path / "ckpt")], check=False).returncode == 1
    assert len(os.listdir(tmp_path)) == 2
    assert torch.equal(load_file(tmp_path / "ckpt" / "model.safetensors")["x"], torch.ones(3))
    save({"x": torch.zeros(3)}, tmp_path / "ckpt")
    assert os.listdir(tmp_path) == ["ckpt"]


def test_without_an_exchange_of_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some filesystems lack it."""
    import ctypes

    class Without:
        @staticmethod
        def renameat2(*args: Any) -> int:
            ctypes.set_errno(22)
            return -1

    save({"x": torch.ones(3)}, tmp_path / "ckpt")
    monkeypatch.setattr(ctypes, "CDLL", lambda *a, **k: Without())
    save({"x": torch.zeros(3)}, tmp_path / "ckpt")
    assert torch.equal(load_file(tmp_path / "ckpt" / "model.safetensors")["x"], torch.zeros(3))
    assert os.listdir(tmp_path) == ["ckpt"]


# -- bad input -------------------------------------------------------------------------------------------------------------


def linear() -> torch.nn.Module:
    return distribute_module(torch.nn.Linear(4, 3), TWO, {"weight": [Shard(0)]})


def good() -> dict[str, torch.Tensor]:
    return {"weight": torch.ones(3, 4), "bias": torch.ones(3)}


def without_bias(path: Path) -> None:
    save_file({"weight": torch.ones(3, 4), "bais": torch.ones(3)}, path)


def wrong_shape(path: Path) -> None:
    save_file(good() | {"weight": torch.ones(4, 3)}, path)


def wrong_dtype(path: Path) -> None:
    save_file(good() | {"bias": torch.ones(3, dtype=torch.complex64)}, path)


def truncated(path: Path) -> None:
    save_file(good(), path)
    path.write_bytes(path.read_bytes()[:-4])


def cut_header(path: Path) -> None:
    save_file(good(), path)
    path.write_bytes(path.read_bytes()[:30])


def garbage(path: Path) -> None:
    save_file(good(), path)
    found = bytearray(path.read_bytes())
    found[10:40] = b"\x00" * 30
    path.write_bytes(found)


def header(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + b"\x00" * 48)


BAD: dict[Callable[[Path], None], str] = {
    without_bias: r"'bias' of the module is missing in .*x\.safetensors; 'bais' is near\n.*'bais' in .*x\.safetensors is no tensor",
    wrong_shape: r"'weight' has shape \(4, 3\) in .*x\.safetensors and \(3, 4\) in the module",
    wrong_dtype: r"'bias' is torch\.complex64 in .*x\.safetensors, which does not convert to torch\.float32",
    truncated: r"x\.safetensors: the file is truncated: tensor 'weight' should end 60 bytes behind the header, and there are 56",
    cut_header: r"x\.safetensors: the file is truncated within its header",
    garbage: r"x\.safetensors: its header is corrupt",
    header('{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0]}}'): r"x\.safetensors: its header is corrupt",
    header('{"a": {"dtype": "F32", "shape": [3], "data_offsets": []}}'): r"x\.safetensors: its header is corrupt",
    header("[" * 5000): r"x\.safetensors: its header is corrupt",
    header("[]"): r"x\.safetensors: its header is corrupt",
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_an_error_at_the_call(case: Callable[[Path], None], tmp_path: Path) -> None:
    case(tmp_path / "x.safetensors")
    there = linear()
    before = values(there)
    with pytest.raises(ValueError, match=BAD[case]):
        load(there, tmp_path / "x.safetensors")
    assert_equal(values(there), before)


def test_not_strict(tmp_path: Path) -> None:
    without_bias(tmp_path / "x.safetensors")
    there = linear()
    bias = there.bias.to_torch()
    done = load(there, tmp_path / "x.safetensors", strict=False)
    assert (done.missing_keys, done.unexpected_keys) == (["bias"], ["bais"])
    assert torch.equal(there.weight.to_torch(), torch.ones(3, 4))
    assert torch.equal(there.bias.to_torch(), bias)
    wrong_shape(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="has shape"):
        load(there, tmp_path / "x.safetensors", strict=False)


@pytest.mark.parametrize("path", ["", ".", "..", "here"])
def test_the_working_directory_is_not_replaced(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    there = tmp_path / "here" if path == "here" else path
    with pytest.raises(ValueError, match=r"is the working directory or holds it.*name a folder in it"):
        save({"x": torch.ones(3)}, there)
    with pytest.raises(ValueError, match="is the working directory or holds it"):
        dtorch.io.save_state(there, x=1)
    save({"x": torch.ones(3)}, "below")
    assert os.listdir() == ["below"]


def test_a_folder_of_a_files_name(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(OSError, match=r"cannot read .*model\.safetensors"):
        load(linear(), tmp_path, progress=False)


def test_bad_indices(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    save_file({"weight": torch.ones(3, 4)}, tmp_path / "a.safetensors")
    index.write_text(json.dumps({"weight_map": {"weight": "a.safetensors", "bias": "b.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"tensor 'bias' should be in .*b\.safetensors.*no such file"):
        load(linear(), tmp_path)
    index.write_text(json.dumps({"weight_map": {"weight": "a.safetensors", "bias": "a.safetensors"}}))
    with pytest.raises(ValueError, match=r"tensor 'bias' should be in .*a\.safetensors.*lacks it"):
        load(linear(), tmp_path)
    truncated(tmp_path / "b.safetensors")
    index.write_text(json.dumps({"weight_map": {"weight": "a.safetensors", "bias": "b.safetensors"}}))
    with pytest.raises(ValueError, match=r"cannot read tensor 'bias': .*b\.safetensors: the file is truncated"):
        load(linear(), tmp_path)
    for text in (
        "{",
        "[]",
        '{"weight_map": {"weight": "../a.safetensors"}}',
        '{"weight_map": {"weight": 3}}',
        "[" * 10**5,
    ):
        index.write_text(text)
        with pytest.raises(ValueError, match="is no index of safetensors files"):
            load(linear(), tmp_path)


def test_bad_places(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
        load(linear(), tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="only nothing"):
        load(linear(), tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"only pytorch_model\.bin; pickled"):
        load(linear(), tmp_path)
    with pytest.raises(ValueError, match="no safetensors file"):
        load(linear(), tmp_path / "pytorch_model.bin")
    for name in "ab":
        save_file(good(), tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"several checkpoints, a\.safetensors, b\.safetensors"):
        load(linear(), tmp_path)
    save_file(good(), tmp_path / "model.safetensors")
    load(linear(), tmp_path)


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"'module' must be a torch\.nn\.Module, not dict"):
        load({}, tmp_path)
    with pytest.raises(TypeError, match="'module_or_state_dict' must be"):
        save([torch.ones(2)], tmp_path)
    with pytest.raises(TypeError, match="'x' is a int"):
        save({"x": 3}, tmp_path)
    with pytest.raises(TypeError, match=r"'x' is torch\.complex128"):
        save({"x": torch.ones(2, dtype=torch.complex128)}, tmp_path)
    with pytest.raises(ValueError, match="'x' is on the meta device"):
        save({"x": torch.ones(2, device="meta")}, tmp_path)
    for name in ("__metadata__", "a\ud800"):  # the format's own word, and what is no text: nobody could read the file
        with pytest.raises(ValueError, match="safetensors cannot hold a tensor of the name"):
            save({"x": torch.ones(2), name: torch.ones(2)}, tmp_path)
    for size in ("many", 0, -1, True, "5 apples"):
        with pytest.raises(ValueError, match="max_shard_size must be"):
            save({"x": torch.ones(2)}, tmp_path, max_shard_size=size)
    with pytest.raises(ValueError, match="single file"):
        save({"x": torch.ones(2)}, tmp_path / "x.safetensors", max_shard_size=10)
    save_file(good(), tmp_path / "good.safetensors")
    with pytest.raises(ValueError, match="'weight' of the module is on the meta device"):
        load(torch.nn.Linear(4, 3, device="meta"), tmp_path / "good.safetensors")
    assert os.listdir(tmp_path) == ["good.safetensors"]


def test_a_file_that_changes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the client cannot check before: the worker's error names the tensor and the file."""
    from dtorch.io import transfers

    save_file(good(), tmp_path / "x.safetensors")
    read = transfers.read

    def changed(*args: Any) -> Any:
        save_file(good() | {"more": torch.ones(2)}, tmp_path / "y.safetensors")
        os.replace(tmp_path / "y.safetensors", tmp_path / "x.safetensors")
        return read(*args)

    monkeypatch.setattr(transfers, "read", changed)
    there = linear()
    with pytest.raises(
        dtorch.errors.RemoteError, match=r"cannot read tensor '\w+' from .*x\.safetensors: the file was changed"
    ):
        load(there, tmp_path / "x.safetensors")


def test_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"weight": torch.ones(3, 4), "bias": torch.ones(3)}, tmp_path / "x.safetensors")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    load(linear(), tmp_path / "x.safetensors", progress=False)
    assert not capsys.readouterr().err
    load(linear(), tmp_path / "x.safetensors")
    shown = capsys.readouterr().err
    assert "Loading: 100%" in shown
    assert "60.0/60.0" in shown
    assert "B/s" in shown


@pytest.mark.parametrize("path", [None, 3, 1.5, b"x", ["x"]], ids=repr)
@pytest.mark.parametrize("name", ["load", "save", "save_state", "load_state"])
def test_what_is_no_path(name: str, path: Any) -> None:
    module = torch.nn.Linear(2, 2)
    calls: dict[str, Callable[[], Any]] = {
        "load": lambda: dtorch.io.load(module, path),
        "save": lambda: dtorch.io.save(module, path),
        "save_state": lambda: dtorch.io.save_state(path, module=module),
        "load_state": lambda: dtorch.io.load_state(path, module=module),
    }
    with pytest.raises(TypeError, match=rf"^{name}\(\): argument 'path' must be a path, not {type(path).__name__}$"):
        calls[name]()
