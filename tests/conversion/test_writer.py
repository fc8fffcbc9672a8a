"""The resumable writer: killed at every step it loses nothing, and a full or read-only disk is an error with a way on."""

import json
import os
import resource
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kimi_hf.checkpoint.layout import TensorSpec
from kimi_hf.checkpoint.shards import open_checkpoint
from kimi_hf.conversion import writer
from kimi_hf.conversion.writer import JOURNAL, PlannedShard, build_header, plan_shards, write_folder
from kimi_hf.errors import CheckpointError

from .helpers import INDEX, Killer, hashes, in_child, read_all, recipe

TENSORS = {f"t{i}": torch.arange(i, i + 300, dtype=torch.int64).reshape(3, 100) for i in range(5)}
FILES = {"config.json": b"{}\n", "extra/note.txt": b"note"}


def shards(per_shard=2):
    return plan_shards([recipe(name, tensor) for name, tensor in TENSORS.items()], per_shard * 2400)


def write(out, **options):
    return write_folder(out, shards(), FILES, **options)


def test_what_is_written(tmp_path):
    out = write(tmp_path / "new" / "out")
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "extra",
        *(f"model-0000{n}-of-000003.safetensors" for n in (1, 2, 3)),
        INDEX,
    ]
    found = read_all(out)
    assert found.keys() == TENSORS.keys() and all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"]["total_size"] == 5 * 2400
    assert list(tmp_path.joinpath("new").iterdir()) == [out]


def test_file_bytes_are_those_of_safetensors(tmp_path):
    tensors = {
        "z": torch.randn(3, 5),
        "b": torch.randn(7).to(torch.bfloat16),
        "a.u8": torch.arange(9, dtype=torch.uint8),
        "ä": torch.randn(2, dtype=torch.float64),
        "i": torch.arange(3, dtype=torch.int32),
        "h": torch.randn(4).half(),
        "q": torch.tensor(True),
    }
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    write_folder(tmp_path / "out", [PlannedShard("model.safetensors", [recipe(n, t) for n, t in tensors.items()])], {})
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    assert not (tmp_path / "out" / INDEX).exists()


def test_a_large_tensor_gets_its_own_shard():
    sizes = [10, 900, 10, 10]
    plan = plan_shards([recipe(f"t{i}", torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate(sizes)], 100)
    assert [[r.spec.name for r in shard.recipes] for shard in plan] == [["t0"], ["t1"], ["t2", "t3"]]


def test_killed_at_every_step_and_resumed(tmp_path):
    """kill -9 before each file operation of the whole job, and in the middle of each write."""
    reference = hashes(write(tmp_path / "reference"))
    log = tmp_path / "log"

    def count():
        counter = Killer().install()
        write(tmp_path / "counted")
        log.write_text(" ".join(counter.names))

    in_child(count)
    steps = log.read_text().split()
    assert {"write", "pwrite", "ftruncate", "fsync", "rename"} <= set(steps) and len(steps) > 40
    kills = [(at, False) for at in range(1, len(steps) + 1)]
    kills += [(at, True) for at, name in enumerate(steps, start=1) if name.endswith("write")]
    for at, half in kills:
        out = tmp_path / f"out-{at}-{half}"
        assert in_child(lambda: (Killer(at, half).install(), write(out))) == -9  # noqa: B023
        if out.exists():
            # The folder has its name only when it is complete.
            assert {name: h for name, h in hashes(out).items() if name != JOURNAL} == reference
        write(out)
        assert hashes(out) == reference
        assert not out.with_name(f"{out.name}.partial").exists()
        shutil.rmtree(out)


def test_resuming_keeps_finished_shards(tmp_path):
    """After a kill in the third shard the first two are not written again."""
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    kept = shards()

    class Stop:
        spec = kept[2].recipes[0].spec

        def chunks(self):
            raise RuntimeError("interrupted")

        def describe(self):
            return kept[2].recipes[0].describe()

    broken = [*kept[:2], PlannedShard(kept[2].file, [Stop(), *kept[2].recipes[1:]])]
    with pytest.raises(RuntimeError, match="interrupted"):
        write_folder(out, broken, FILES)
    done = {path.name: path.stat().st_ino for path in partial.glob("*.safetensors")}
    assert len(done) == 2 and (partial / JOURNAL).exists() and not out.exists()
    assert list(partial.glob("*.part")), "the unfinished shard is recognisable"
    write(out)
    assert {name: (out / name).stat().st_ino for name in done} == done


def test_finished_job_again(tmp_path):
    """A kill after the folder got its name, before the journal was removed: the command again just tidies up."""
    out = write(tmp_path / "out")
    before = hashes(out)
    status = in_child(lambda: (setattr(writer.Path, "unlink", lambda *_: os._exit(9)), write(tmp_path / "again")))
    assert status == 9 and (tmp_path / "again" / JOURNAL).exists()
    write(tmp_path / "again")
    assert hashes(tmp_path / "again") == before
    with pytest.raises(CheckpointError, match="exists"):
        write(out)


def test_torn_journal_line(tmp_path):
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    in_child(lambda: (Killer(30).install(), write(out)))
    with (partial / JOURNAL).open("ab") as file:
        file.write(b'{"shard": "model-0')
    write(out)
    assert read_all(out).keys() == TENSORS.keys()


def test_another_job_in_the_way(tmp_path):
    out = tmp_path / "out"
    assert in_child(lambda: (Killer(25).install(), write(out, label="first"))) == -9
    with pytest.raises(CheckpointError, match=r"another unfinished job \('first'"):
        write_folder(out, shards(3), FILES)
    shutil.rmtree(tmp_path / "out.partial")
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine.txt").write_text("x")
    with pytest.raises(CheckpointError, match="not an unfinished job"):
        write(out)


def test_changed_source_is_another_job(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    source.write_text("1")
    assert in_child(lambda: (Killer(25).install(), write(out, sources=[source]))) == -9
    os.utime(source, (1, 1))
    with pytest.raises(CheckpointError, match="other input or options"):
        write(out, sources=[source])


def test_two_writers(tmp_path):
    out = tmp_path / "out"

    class Nested:
        spec = TensorSpec("n", "U8", (1,))
        seen = None

        def chunks(self):
            if Nested.seen is None:
                Nested.seen = in_child(lambda: write_folder(out, [PlannedShard("model.safetensors", [Nested()])], {}))
            yield bytearray(1)

        def describe(self):
            return "nested"

    write_folder(out, [PlannedShard("model.safetensors", [Nested()])], {})
    assert Nested.seen == 1


def test_existing_folder_and_source_are_safe(tmp_path):
    (tmp_path / "out").mkdir()
    write(tmp_path / "out")  # an empty folder is taken
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    with pytest.raises(CheckpointError, match="exists; choose another"):
        write(tmp_path / "full")
    source = tmp_path / "source" / "model.safetensors"
    source.parent.mkdir()
    source.write_text("x")
    with pytest.raises(CheckpointError, match="holds the input model.safetensors"):
        write(tmp_path / "source", sources=[source])


def test_readback_is_compared(tmp_path):
    class Unstable:
        spec = TensorSpec("unstable", "U8", (4,))
        calls = 0

        def chunks(self):
            Unstable.calls += 1
            yield bytearray([Unstable.calls] * 4)

        def describe(self):
            return "unstable"

    with pytest.raises(CheckpointError, match=r"model.safetensors.part: tensor unstable reads back differently"):
        write_folder(tmp_path / "out", [PlannedShard("model.safetensors", [Unstable()])], {})
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial/model.safetensors").exists()


def test_holes_stay_holes(tmp_path):
    class Hole:
        spec = TensorSpec("hole", "U8", (1 << 26,))

        def chunks(self):
            yield 1 << 25
            yield bytearray(1 << 25)

        def describe(self):
            return "hole"

    one = recipe("t", TENSORS["t0"])
    out = write_folder(tmp_path / "out", [PlannedShard("model.safetensors", [Hole(), one])], {})
    file = out / "model.safetensors"
    assert file.stat().st_size > 1 << 26 and file.stat().st_blocks * 512 < 1 << 20
    assert torch.equal(open_checkpoint(out).read("t"), TENSORS["t0"])


def test_wrong_size_from_a_recipe(tmp_path):
    class Short:
        spec = TensorSpec("short", "U8", (4,))

        def chunks(self):
            yield bytearray(3)

        def describe(self):
            return "short"

    with pytest.raises(CheckpointError, match="short: its sources gave -1 bytes"):
        write_folder(tmp_path / "out", [PlannedShard("model.safetensors", [Short()])], {})


def test_names_must_differ(tmp_path):
    twice = [recipe("t", TENSORS["t0"]), recipe("t", TENSORS["t1"])]
    with pytest.raises(CheckpointError, match="share a name"):
        write_folder(tmp_path / "out", [PlannedShard("model.safetensors", twice)], {})


def test_free_space_is_checked_first(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(CheckpointError, match="needs 0.0 GB more but its disk has 0.0 GB free"):
        write(tmp_path / "out")
    write(tmp_path / "sparse", density=0.01)


def limited(size, work):
    """Run in a child that may not write files beyond `size` bytes; the message of the error it raises."""

    def child():
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        work()

    return in_child(child)


def test_file_size_limit_and_resume(tmp_path):
    out = tmp_path / "out"
    plan = plan_shards([recipe("small", TENSORS["t0"]), recipe("big", torch.ones(5000))], 3000)

    def attempt():
        with pytest.raises(CheckpointError, match=r"limit is full .*out.partial.*continues it"):
            write_folder(out, plan, FILES)

    assert limited(8000, attempt) == 0
    partial = tmp_path / "out.partial"
    assert (partial / "model-00001-of-000002.safetensors").exists() and not out.exists()
    write_folder(out, plan, FILES)
    assert torch.equal(read_all(out)["big"], torch.ones(5000))


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 96 KiB, where the system lets us mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(disk)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_full_disk_and_resume(small_disk, monkeypatch):
    out = small_disk / "out"
    big = plan_shards([recipe("a", torch.ones(5000)), recipe("b", torch.ones(9000))], 20_000)
    with pytest.raises(CheckpointError, match="its disk has 0.0 GB free"):
        write_folder(out, plan_shards([recipe("c", torch.ones(50_000))], 10**9), {})
    assert not list(small_disk.iterdir()), "refused before anything was written"
    filler = small_disk / "filler"
    filler.write_bytes(bytes(50_000))
    monkeypatch.setattr(writer._Job, "check_space", lambda *_: None)  # another program fills the disk meanwhile
    with pytest.raises(CheckpointError, match="No space left on device"):
        write_folder(out, big, FILES)
    assert (small_disk / "out.partial/model-00001-of-000002.safetensors").exists() and not out.exists()
    filler.unlink()
    write_folder(out, big, FILES)
    assert torch.equal(read_all(out)["b"], torch.ones(9000))


def test_read_only_disk(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointError, match="cannot be written .Read-only file system"):
        write(small_disk / "out")


def test_folder_without_permission():
    """As an ordinary user: root may write everywhere, so the child gives its rights up first."""
    base = Path(tempfile.mkdtemp())
    try:
        base.chmod(0o755)
        (base / "closed").mkdir(mode=0o555)

        def attempt():
            if os.geteuid() == 0:
                os.setegid(65534)
                os.seteuid(65534)
            with pytest.raises(CheckpointError, match=r"out.partial cannot be written .Permission denied"):
                write(base / "closed" / "out")

        assert in_child(attempt) == 0
        assert not list((base / "closed").iterdir())
    finally:
        shutil.rmtree(base)


def test_header_is_padded():
    header = build_header([TensorSpec("a", "U8", (1,))], {"format": "pt"})
    assert len(header) % 8 == 0 and int.from_bytes(header[:8], "little") == len(header) - 8
