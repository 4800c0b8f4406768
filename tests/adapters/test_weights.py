"""Every byte of an engine's weight files identifies them."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from support.inside import set_bounds

from ragorder.adapters.vllm_tiers.disk_identity import UnknownWeightsError, WeightDigests


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 64}')
    (folder / "model.safetensors").write_bytes(os.urandom(100_000))
    return folder


class TestWhichFilesCount:
    def test_a_folder_of_weights_is_identified_by_its_files(self, model: Path, tmp_path: Path) -> None:
        before = WeightDigests().of(str(model))
        copy = shutil.copytree(model, tmp_path / "elsewhere")
        assert WeightDigests().of(str(model)) == WeightDigests().of(str(copy)) == before
        (model / "tokenizer.json").write_text("{}")
        (model / "README.md").write_text("hello")
        assert WeightDigests().of(str(model)) == before
        (model / "config.json").write_text('{"hidden_size": 65}')
        assert WeightDigests().of(str(model)) != before
        (model / "config.json").write_text('{"hidden_size": 64}')
        assert WeightDigests().of(str(model)) == before

    def test_a_folder_without_weights_is_refused_unless_they_are_dummies(self, model: Path) -> None:
        (model / "model.safetensors").unlink()
        with pytest.raises(UnknownWeightsError, match="the folder has none"):
            WeightDigests().of(str(model))
        dummies = WeightDigests().of(str(model), dummy=True)
        (model / "config.json").write_text('{"hidden_size": 65}')
        assert WeightDigests().of(str(model), dummy=True) != dummies
        # Whatever it is called: it may be weights.
        (model / "consolidated.00.weights").write_bytes(b"weights")
        before = WeightDigests().of(str(model))
        (model / "consolidated.00.weights").write_bytes(b"WEIGHTS")
        assert WeightDigests().of(str(model)) != before

    def test_a_single_file_is_identified_by_its_content(self, model: Path) -> None:
        before = WeightDigests().of(str(model / "model.safetensors"))
        (model / "config.json").unlink()
        assert WeightDigests().of(str(model / "model.safetensors")) == before
        (model / "model.safetensors").write_bytes(b"other weights")
        assert WeightDigests().of(str(model / "model.safetensors")) != before

    def test_a_patched_file_in_the_hubs_cache_is_another_one(self, tmp_path: Path) -> None:
        blobs, snapshots = tmp_path / "blobs", [tmp_path / "snapshots" / name for name in ("one", "two")]
        blobs.mkdir()
        (blobs / "a1b2").write_bytes(b"weights")
        for folder in snapshots:
            folder.mkdir(parents=True)
            (folder / "model.safetensors").symlink_to(blobs / "a1b2")
        before = WeightDigests().of(str(snapshots[0]))
        assert WeightDigests().of(str(snapshots[1])) == before
        (blobs / "a1b2").write_bytes(b"patched")
        assert WeightDigests().of(str(snapshots[0])) == WeightDigests().of(str(snapshots[1])) != before

    def test_a_name_on_the_hub_needs_one_commit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        constants = pytest.importorskip("huggingface_hub.constants")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(UnknownWeightsError, match="folder"):
            WeightDigests().of("org/name")
        snapshots = tmp_path / "models--org--name" / "snapshots"
        (snapshots / "first").mkdir(parents=True)
        first = WeightDigests().of("org/name")
        assert "first" in first
        (snapshots / "first" / "model.safetensors").write_bytes(b"weights")
        assert WeightDigests().of("org/name") != first
        assert WeightDigests().of("org/name", hub=tmp_path / "elsewhere", revision="a" * 40) == WeightDigests().of(
            "org/name", "a" * 40
        )
        (snapshots / "second").mkdir()
        with pytest.raises(UnknownWeightsError, match="2 revisions"):
            WeightDigests().of("org/name")
        assert WeightDigests().of("org/name", "a" * 40) != WeightDigests().of("org/name", "b" * 40)
        with pytest.raises(UnknownWeightsError):
            WeightDigests().of("org/name", "main")


class TestEveryByteOfTheWeightsCounts:
    """And a restart does not read them again, unless something has touched them."""

    @pytest.fixture
    def reads(self, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
        """How many bytes were read of files, by the names of these."""
        found: Counter[str] = Counter()
        pread = os.pread

        def counting(descriptor: int, count: int, offset: int) -> bytes:
            read = pread(descriptor, count, offset)
            found[Path(os.readlink(f"/proc/self/fd/{descriptor}")).name] += len(read)
            return read

        monkeypatch.setattr(os, "pread", counting)
        return found

    def settle(self, *files: Path) -> None:
        """As if they had been there for long: a change just before reading may be followed by one that looks alike."""
        for file in files:
            os.utime(file, (1, 1))

    @pytest.mark.parametrize("place", [0, 4095, 4096, 31_337, 49_999, 99_998, 99_999])
    def test_a_single_bit_with_size_and_times_as_before(self, model: Path, tmp_path: Path, place: int) -> None:
        path = model / "model.safetensors"
        self.settle(path, model / "config.json")
        before = WeightDigests(tmp_path / "memory").of(str(model))
        status = path.stat()
        with path.open("r+b") as file:
            file.seek(place)
            [byte] = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1]))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert path.stat().st_mtime_ns == status.st_mtime_ns
        assert WeightDigests().of(str(model)) != before
        assert WeightDigests(tmp_path / "memory").of(str(model)) != before

    def test_a_file_that_took_the_others_place_and_time(self, model: Path, tmp_path: Path) -> None:
        path, other = model / "model.safetensors", tmp_path / "other"
        before = WeightDigests(tmp_path / "memory").of(str(model))
        status = path.stat()
        other.write_bytes(path.read_bytes()[::-1])
        os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
        other.replace(path)
        assert WeightDigests(tmp_path / "memory").of(str(model)) != before

    def test_bytes_that_moved_to_another_file_are_another_model(self, tmp_path: Path) -> None:
        found = []
        for name, parts in {"one": (b"ab", b"c"), "two": (b"a", b"bc"), "three": (b"", b"abc")}.items():
            (tmp_path / name).mkdir()
            for number, part in enumerate(parts):
                (tmp_path / name / f"model-{number}.safetensors").write_bytes(part)
            found.append(WeightDigests().of(str(tmp_path / name)))
        assert len(set(found)) == 3

    def test_restarts_read_nothing(
        self, model: Path, tmp_path: Path, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        memory, weights = tmp_path / "disk" / "weights.json", model / "model.safetensors"
        set_bounds(monkeypatch, settled_ns=-1)
        before = WeightDigests(memory).of(str(model))
        assert reads["model.safetensors"] == 100_000
        assert memory.stat().st_mode & 0o777 == 0o600
        assert WeightDigests(memory).of(str(model)) == before
        assert reads["model.safetensors"] == 100_000
        weights.touch()
        assert WeightDigests(memory).of(str(model)) == before
        assert reads["model.safetensors"] == 200_000

    def test_what_changed_just_now_is_not_remembered(self, model: Path, tmp_path: Path, reads: Counter[str]) -> None:
        for _ in range(2):
            WeightDigests(tmp_path / "memory").of(str(model))
        assert reads["model.safetensors"] == 200_000

    @pytest.mark.parametrize("damage", ["open", "rubbish", "list", "deep", "pipe", "link", "gone"])
    def test_a_memory_that_cannot_be_believed(
        self, model: Path, tmp_path: Path, reads: Counter[str], monkeypatch: pytest.MonkeyPatch, damage: str
    ) -> None:
        memory = tmp_path / "memory"
        set_bounds(monkeypatch, settled_ns=-1)
        before = WeightDigests(memory).of(str(model))
        if damage == "open":
            memory.chmod(0o666)
        elif damage in ("pipe", "link", "gone"):
            memory.rename(tmp_path / "kept")
            if damage == "pipe":
                os.mkfifo(memory, 0o600)
            elif damage == "link":
                memory.symlink_to(tmp_path / "kept")
        else:
            memory.write_bytes({"rubbish": b"\xff{", "list": b"[1]", "deep": b"[" * 5000}[damage])
        assert WeightDigests(memory).of(str(model)) == before
        assert reads["model.safetensors"] == 200_000

    def test_a_file_that_changes_while_it_is_read(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pread = os.pread

        def changing(descriptor: int, count: int, offset: int) -> bytes:
            with (model / "model.safetensors").open("ab") as file:
                file.write(b"more")
            return pread(descriptor, count, offset)

        monkeypatch.setattr(os, "pread", changing)
        with pytest.raises(UnknownWeightsError, match="changes"):
            WeightDigests(tmp_path / "memory").of(str(model))
