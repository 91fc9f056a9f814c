"""Find, read and validate rule files."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from onnxfuse.errors import RuleError
from onnxfuse.rules import spec, yaml_text
from onnxfuse.rules.lint import require
from onnxfuse.rules.program import Program, compile_rule

_PACKAGE = Path(__file__).resolve().parent.parent
#: Installed, the rules lie in the package; in a checkout, beside it.
_BUILTIN_PLACES = (_PACKAGE / "data" / "rules", _PACKAGE.parent / "rules")
_TESTS = re.compile(r"^tests:", re.MULTILINE)
_TOP_LEVEL_KEY = re.compile(r"^[A-Za-z_]", re.MULTILINE)


@dataclass
class Source:
    """Where a rule came from. The tests are only parsed when somebody asks for them."""

    path: Path
    text: str
    tests_at: int | None
    _lines: dict[str, int] | None = field(default=None, repr=False)
    _tests: spec.Tests | None = field(default=None, repr=False)

    def line(self, check: str) -> int | None:
        """The line of a check's id, or of the nearest key above it."""
        if self._lines is None:
            self._lines = yaml_text.lines(self.text, str(self.path))
        return nearest_line(self._lines, check)

    def tests(self) -> spec.Tests:
        """The inline cases. RuleError if they are missing or malformed."""
        if self._tests is None:
            document = yaml_text.parse(self.text, str(self.path))
            if "tests" not in document:
                raise RuleError(
                    "the rule has no `tests`", where=str(self.path), hint="add a `match` and a `no_match` case"
                )
            self._tests = _validate(spec.Tests, document["tests"], self, "tests")
        return self._tests


@dataclass
class RuleSet:
    """Compiled rules by id, in order of id."""

    programs: dict[str, Program]

    def stage(self, name: str) -> list[Program]:
        return [p for p in self.programs.values() if p.stage == name]

    def get(self, rule_id: str) -> Program:
        """The rule, or RuleError with the nearest known id."""
        if rule_id in self.programs:
            return self.programs[rule_id]
        near = difflib.get_close_matches(rule_id, self.programs, n=1)
        hint = f"did you mean `{near[0]}`?" if near else "`onnxfuse rules list` shows the rules"
        raise RuleError(f"no rule `{rule_id}`", hint=hint)

    def __iter__(self) -> Iterator[Program]:
        return iter(self.programs.values())

    def __len__(self) -> int:
        return len(self.programs)


_CACHE: dict[tuple[str, int, int], Program] = {}


def builtin_folder() -> Path:
    for place in _BUILTIN_PLACES:
        if (place / "rule.schema.json").exists() or (place / "lift").is_dir():
            return place
    raise RuleError("the built-in rules are missing", hint="the installation is damaged; install onnxfuse again")


def load(paths: Iterable[str | os.PathLike[str]] = (), builtin: bool = True) -> RuleSet:
    """Load rules from files and folders (searched for ``*.yaml``), and the built-in ones.

    Raises:
        RuleError: a file is missing or malformed, an id differs from its file name or is used twice.
    """
    files: list[Path] = []
    if builtin:
        folder = builtin_folder()
        for stage in ("lift", "fuse", "lower"):
            files += sorted((folder / stage).glob("**/*.yaml"))
    for given in paths:
        files += _files(Path(given))
    programs: dict[str, Program] = {}
    for file in files:
        program = load_file(file)
        other = programs.get(program.id)
        if other is not None and other.source.path.resolve() != file.resolve():
            raise RuleError(
                f"two rules are called `{program.id}`",
                where=f"{file}:{program.line('id')}",
                hint=f"the other one: {other.file}",
            )
        programs[program.id] = program
    return RuleSet(dict(sorted(programs.items())))


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = [f for f in sorted(path.glob("**/*.yaml")) if "bad" not in f.relative_to(path).parts[:-1]]
        if not found:
            raise RuleError(f"no rule file (*.yaml) in `{path}`")
        return found
    if not path.is_file():
        raise RuleError(f"no such rule file: `{path}`", hint="name a .yaml file or a folder of them")
    return [path]


def load_file(path: Path) -> Program:
    """Load one rule file; cached until the file changes."""
    try:
        stat = path.stat()
        key = (str(path), stat.st_mtime_ns, stat.st_size)
        if key in _CACHE:
            return _CACHE[key]
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RuleError(f"cannot read the rule file: {error}", where=str(path)) from error
    program = parse(text, path)
    if program.id != path.stem:
        raise RuleError(
            f"the rule is called `{program.id}`, its file `{path.name}`",
            where=f"{path}:{program.line('id')}",
            hint="file name and id must be equal",
        )
    _CACHE[key] = program
    return program


def parse(text: str, path: Path) -> Program:
    """Parse, validate and compile the text of a rule file. The cases below a last `tests:` are skipped."""
    cut = _TESTS.search(text)
    tests_at = cut.start() if cut and not _TOP_LEVEL_KEY.search(text, cut.end()) else None
    source = Source(path, text, tests_at)
    document = yaml_text.parse(text if tests_at is None else text[:tests_at], str(path))
    if not isinstance(document, dict):
        raise RuleError("a rule file must be a mapping", where=f"{path}:1")
    tests = document.pop("tests", None)
    if tests is not None:
        source._tests = _validate(spec.Tests, tests, source, "tests")
    elif tests_at is None:
        raise RuleError("the rule has no `tests`", where=str(path), hint="add a `match` and a `no_match` case")
    rule = _validate(spec.Rule, document, source, "")
    program = compile_rule(rule, source)
    require(program)
    return program


def _validate(model: Any, document: Any, source: Source, prefix: str) -> Any:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        # A misspelled key is both unknown and missing; the first is what to say.
        problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
        path = prefix
        for part in _in_file(problem["loc"]):
            path = f"{path}[{part}]" if isinstance(part, int) else (f"{path}.{part}" if path else str(part))
        message = problem["msg"].removeprefix("Value error, ")
        hint = None
        last = str(problem["loc"][-1]) if problem["loc"] else ""
        if problem["type"] == "extra_forbidden":
            message = f"unknown key `{last}`"
            near = difflib.get_close_matches(last, _keys(), n=1)
            hint = f"did you mean `{near[0]}`?" if near else "docs/reference/rule-format.md lists the keys"
        elif problem["type"] == "missing":
            message = f"the key `{last}` is missing"
        else:
            shown = problem.get("input")
            alternatives = sum(_in_file(p["loc"]) == _in_file(problem["loc"]) for p in problems)
            key = next((part for part in reversed(_in_file(problem["loc"])) if isinstance(part, str)), "")
            if alternatives > 1:
                message = f"expected {_EXPECTED.get(key, 'another kind of value')}"
            message = f"`{path}` is `{shown}`: {message[:1].lower()}{message[1:]}"
        lines = yaml_text.lines(source.text, str(source.path))
        where = f"{source.path}:{nearest_line(lines, path) or 1}"
        raise RuleError(message, where=where, hint=hint) from error


#: What a key takes that accepts several kinds of values.
_EXPECTED = {
    "in": "an operand: a value (`x`, `x?`), `$capture`, number, list of numbers, `_`, `absent` or a last `...`",
    "of": "an operand: a value, `$capture`, dim or number",
    "shape": "a size, a dim (`N`), `_`, or at the front `...` or `1...`",
    "dtype": "a dtype name, a list of them, or T, U or V",
    "rank": "a number, or a condition such as `>=2` or `2..4`",
    "shared": "a list of op types, or `any`",
}


def _in_file(location: tuple[int | str, ...]) -> list[int | str]:
    """The path in the file of pydantic's path, which also names the kind of each node and the type that was tried."""
    kept: list[int | str] = []
    for index, part in enumerate(location):
        before = location[index - 1] if index else None
        names_kind = isinstance(before, int) or before == "node" or (index >= 2 and location[index - 2] == "nodes")
        if part in ("op", "chain", "is", "any_of", "extend") and names_kind:
            continue
        if isinstance(part, str) and ("[" in part or part in ("str", "int", "float", "bool", "constrained-str")):
            continue
        kept.append(part)
    return kept


def _keys() -> list[str]:
    names: set[str] = set()
    for model in vars(spec).values():
        if isinstance(model, type) and issubclass(model, spec.Strict):
            names |= {f.alias or name for name, f in model.model_fields.items()}
    return sorted(names)


def nearest_line(lines: dict[str, int], path: str) -> int | None:
    """The line of a path, else of the longest part of it that has one."""
    while path:
        if path in lines:
            return lines[path]
        path = re.sub(r"(\.[^.\[\]]+|\[[^\]]*\])$", "", path) if re.search(r"[.\[]", path) else ""
    return None
