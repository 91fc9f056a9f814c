#!/usr/bin/env python3
"""Fetches ONNX Runtime's C API headers from Debian's `libonnxruntime-dev`, without root.

Usage: fetch_ort_headers.py OUT

Uses the machine's own apt sources and keys, with package lists of its own under a temporary folder, so that neither
root nor `apt-get update` is needed. If the configured release is older than the package (Debian has it from trixie
on), the same sources are asked for that release. Writes OUT/onnxruntime_c_api.h and the headers beside it.
"""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

PACKAGE = "libonnxruntime-dev"
RELEASE_WITH_THE_PACKAGE = "trixie"
SOURCES = ("/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list")


def apt(arguments: list[str], options: list[str], folder: pathlib.Path) -> None:
    subprocess.run(["apt-get", "-qq", *options, *arguments], cwd=folder, check=True, timeout=120)


def options_for(scratch: pathlib.Path, source_list: pathlib.Path) -> list[str]:
    for name in ("lists/partial", "cache/archives/partial"):
        (scratch / name).mkdir(parents=True, exist_ok=True)
    pairs = {
        "Dir::Etc::sourcelist": source_list,
        "Dir::Etc::sourceparts": "-",
        "Dir::State::Lists": scratch / "lists",
        "Dir::Cache": scratch / "cache",
        "APT::Sandbox::User": "root",  # the scratch folder is not readable by apt's own user
        "Debug::NoLocking": "1",
    }
    return [item for key, value in pairs.items() for item in ("-o", f"{key}={value}")]


def for_release(text: str, release: str) -> str:
    """A deb822 or one-line source list with its main archive moved to another release, and nothing else in it."""
    if re.search(r"^Suites:", text, re.M):
        stanza = next(s for s in text.split("\n\n") if re.search(r"^Suites:", s, re.M))
        return re.sub(r"^Suites:.*$", f"Suites: {release}", stanza, flags=re.M) + "\n"
    line = next(line for line in text.splitlines() if line.startswith("deb ") and "security" not in line)
    return re.sub(r"^(deb (?:\[[^]]*\] )?\S+) \S+", rf"\1 {release}", line) + "\n"


def fetch(out: pathlib.Path) -> None:
    source = next((p for p in map(pathlib.Path, SOURCES) if p.exists() and "deb" in p.read_text()), None)
    if source is None:
        raise RuntimeError("this machine has no Debian apt sources")
    problems = []
    for release in (None, RELEASE_WITH_THE_PACKAGE):
        with tempfile.TemporaryDirectory() as name:
            scratch = pathlib.Path(name)
            own = scratch / f"own{source.suffix}"
            own.write_text(source.read_text() if release is None else for_release(source.read_text(), release))
            options = options_for(scratch, own)
            try:
                apt(["update"], options, scratch)
                apt(["download", PACKAGE], options, scratch)
                package = next(scratch.glob(f"{PACKAGE}_*.deb"))
                subprocess.run(["dpkg-deb", "-x", str(package), str(scratch / "deb")], check=True)
                headers = next((scratch / "deb").rglob("onnxruntime_c_api.h")).parent
                shutil.copytree(headers, out, dirs_exist_ok=True)
                return
            except (subprocess.SubprocessError, StopIteration, OSError) as error:
                problems.append(f"{release or 'the configured release'}: {error}")
    raise RuntimeError("; ".join(problems))


def main() -> int:
    out = pathlib.Path(sys.argv[1])
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        print("not a Debian machine: no apt-get", file=sys.stderr)
        return 1
    try:
        fetch(out)
    except RuntimeError as error:
        print(f"{PACKAGE} could not be fetched: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
