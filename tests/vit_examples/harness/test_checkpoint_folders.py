"""Folders of checkpoints and their manifests: names that lead out of a folder, remains of killed processes."""

import os
import signal

import pytest

pytest.importorskip("safetensors")

from vit_examples.harness import checkpoint_folders
from vit_examples.harness.checkpoint_folders import CheckpointFolders
from vit_examples.harness.manifest import files_in_manifest, require_intact, sealed, write_manifest


def require_all_intact(folder):
    require_intact(folder, files_in_manifest(folder))


def checkpoint(folder):
    folder.mkdir()
    (folder / "good").write_bytes(b"content")
    write_manifest(folder, {"good": sealed(folder / "good")})
    return folder


def refusal(folder, name):
    """What checking a manifest says that has ``name`` besides; nothing but the manifest itself is opened."""
    content = sealed(folder / "good")
    write_manifest(folder, {"good": content, name: content})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vit_examples.harness.manifest._described", lambda path: pytest.fail(f"{path} was read"))
        with pytest.raises(ValueError) as refused:
            require_all_intact(folder)
        with pytest.raises(ValueError, match=r".+"):
            require_intact(folder, ["good", name])
    return str(refused.value)


@pytest.mark.parametrize("name", ["/dev/zero", "../outside", "inner/good", "..", ".", "", "a\0b", "/etc/passwd"])
def test_a_name_that_leads_out_of_the_folder_is_refused_before_anything_is_read(tmp_path, name):
    (tmp_path / "outside").write_bytes(b"content")
    folder = checkpoint(tmp_path / "saved")
    (folder / "inner").mkdir()
    (folder / "inner" / "good").write_bytes(b"content")
    assert f"{folder}: {name!r} is not the name of a file in it" in refusal(folder, name)


@pytest.mark.parametrize("kind", ["link to a device", "link out", "link within", "pipe", "folder"])
def test_what_is_no_plain_file_is_refused_before_anything_is_read(tmp_path, kind):
    folder = checkpoint(tmp_path / "saved")
    (tmp_path / "outside").write_bytes(b"content")
    make = {
        "link to a device": lambda path: path.symlink_to("/dev/zero"),
        "link out": lambda path: path.symlink_to(tmp_path / "outside"),
        "link within": lambda path: path.symlink_to("good"),
        "pipe": os.mkfifo,
        "folder": os.mkdir,
    }
    make[kind](folder / "other")
    assert f"{folder / 'other'}: no plain file" in refusal(folder, "other")


def test_a_manifest_that_is_no_plain_file_is_refused(tmp_path):
    folder = checkpoint(tmp_path / "saved")
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"manifest\.json: no plain file"):
        require_all_intact(folder)


def test_a_file_of_another_size_is_refused_without_hashing_it(tmp_path):
    """As one that never ends would be, if it looked like a plain file."""
    folder = checkpoint(tmp_path / "saved")
    with (folder / "good").open("ab") as stream:
        stream.truncate(1 << 40)  # with a hole: hashing takes ten minutes
    with pytest.raises(ValueError, match=r"good: damaged: 1099511627776 bytes, but 7 were written"):
        require_all_intact(folder)


def test_what_a_kill_leaves_of_an_old_checkpoint_is_gone_at_the_next_save(tmp_path):
    """Killed once the old one has its other name, before its files are gone."""
    folders = CheckpointFolders("step", 8)
    for number in (1, 2, 3):
        (tmp_path / f"step-{number:08d}").mkdir()
        (tmp_path / f"step-{number:08d}" / "file").write_bytes(b"content")
    real, going = checkpoint_folders.shutil.rmtree, tmp_path / "step-00000001.tmp"
    child = os.fork()
    if child == 0:

        def killed(path, **options):
            if going.exists():
                os.kill(os.getpid(), signal.SIGKILL)
            real(path, **options)

        checkpoint_folders.shutil.rmtree = killed
        folders.delete_but(tmp_path, 2)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL and (going / "file").exists()
    (tmp_path / "step-best.tmp").mkdir()
    (tmp_path / "epoch-0001.tmp").mkdir()
    temporary = folders.begin(tmp_path, 4)
    assert temporary == tmp_path / "step-00000004.tmp" and temporary.is_dir() and not list(temporary.iterdir())
    assert not going.exists()
    assert (tmp_path / "step-best.tmp").exists() and (tmp_path / "epoch-0001.tmp").exists(), "they are not the run's"
    assert [path.name for path in folders.complete(tmp_path)] == ["step-00000002", "step-00000003"]


def test_a_kill_while_a_checkpoint_is_written_anew_leaves_the_old_or_the_new_one(tmp_path):
    """Wherever it happens, and the next save succeeds."""
    folders = CheckpointFolders("step", 8)

    def write(folder, content):
        unfinished = folders.begin(folder, 1)
        for name in "ab":
            (unfinished / name).write_text(content)

    def held(checkpoint):
        return {path.name: path.read_text() for path in checkpoint.iterdir()}

    old, new, newer = ({"a": content, "b": content} for content in ("old", "new", "newer"))
    status, killed_before = -1, 0
    while status != 0:
        folder = tmp_path / str(killed_before)
        write(folder, "old")
        folders.complete_with(folder, 1)
        write(folder, "new")
        child = os.fork()
        if child == 0:
            kill_before_change(killed_before)
            folders.complete_with(folder, 1)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        newest = folders.newest(folder)
        assert newest is not None and folders.number_of(newest) == 1, killed_before
        assert held(newest) in ([new] if status == 0 else [old, new]), killed_before
        write(folder, "newer")
        assert folders.newest(folder) is not None, killed_before
        folders.complete_with(folder, 1)
        folders.delete_but(folder, 1)
        assert [path.name for path in folder.iterdir()] == ["step-00000001"]
        assert held(folder / "step-00000001") == newer
        killed_before += 1
    assert killed_before > 3, "it makes several changes"


def kill_before_change(number):
    """Kill this process before it renames or deletes once more than ``number`` times."""
    left = number

    def counted(change):
        def call(*arguments, **options):
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return change(*arguments, **options)

        return call

    os.rename, os.unlink, os.rmdir = map(counted, (os.rename, os.unlink, os.rmdir))
