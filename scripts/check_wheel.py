"""Build a wheel and an sdist, and try the wheel away from the checkout: python scripts/check_wheel.py

The wheel of the sdist must hold the same files. Beside the wheel the environment sees what this one has installed.
"""

from __future__ import annotations

import json
import site
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STATUS = {
    **{
        "kind": "units",
        "state": "on",
        "step": 10,
        "time": 0.0,
        "step_s": 0.1,
        "expected_step_s": 0.1,
        "even_step_s": 0.2,
    },
    **{"saved_s": 1.0, "cost_s": 0.0, "ranks": [], "decided": ""},
}


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command and return what it prints; what it says where it fails ends this program."""
    done = subprocess.run([str(each) for each in command], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} has failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def wheel_of(source: Path, folder: Path) -> Path:
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-qq",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
        source,
        cwd=folder,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if name.startswith("zeroresize/")}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folders = {each: folder / each for each in ("first", "again", "sdist", "empty", "source")}
        for path in folders.values():
            path.mkdir()
        copy = folders["source"]
        tracked = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")[:-1]
        for each in tracked:  # so that nothing that was built before is in it
            if (ROOT / each).is_file():
                (copy / each).parent.mkdir(parents=True, exist_ok=True)
                (copy / each).write_bytes((ROOT / each).read_bytes())
        wheel = wheel_of(copy, folders["first"])
        backend = "import sys, setuptools.build_meta as b; b.build_sdist(sys.argv[1])"
        run(sys.executable, "-c", backend, folders["sdist"], cwd=copy)
        (sdist,) = folders["sdist"].glob("*.tar.gz")
        if differing := names_in(wheel) ^ names_in(wheel_of(sdist, folders["again"])):
            sys.exit(f"the sdist's wheel has other files: {sorted(differing)}")
        venv.create(folder / "venv", with_pip=False)
        python = folder / "venv" / "bin" / "python"
        (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
        run(sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", packages, wheel, cwd=folder)
        others = [path for path in site.getsitepackages() if Path(path).is_dir()]
        hide = "import sys; sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in repr(each).lower()]"
        (packages / "others.pth").write_text("\n".join([*others, hide]) + "\n")
        place = run(python, "-c", "import zeroresize; print(zeroresize.__file__)", cwd=folders["empty"]).strip()
        if not place.startswith(str(folder)):
            sys.exit(f"not the wheel was tried, but {place}")
        (folders["empty"] / "status.jsonl").write_text(json.dumps(STATUS) + "\n")
        command = [python, "-m", "zeroresize.commands"]
        for arguments in (["--help"], ["live", "--once", "status.jsonl"], ["report", "status.jsonl"]):
            run(*command, *arguments, cwd=folders["empty"])
        print(f"{wheel.name} and {sdist.name} are whole, and the wheel's commands run by themselves")


if __name__ == "__main__":
    main()
