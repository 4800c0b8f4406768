"""Former command of the suite staged-search."""

from pathlib import Path

from ragorder.eval._aliases.command import run_suite


def _corpus(name: str) -> list[str]:
    # A corpus was named by its folder.
    folder = Path(name).resolve()
    return ["--set", f"corpus={folder.name}", *(["--corpora", str(folder.parent)] if name != "pydocs" else [])]


if __name__ == "__main__":
    run_suite("staged-search", former={"--corpus": _corpus})
