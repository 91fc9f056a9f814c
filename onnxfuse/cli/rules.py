"""`onnxfuse rules …`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from onnxfuse.cli import counter, options, render
from onnxfuse.errors import EXIT_FINDINGS, EXIT_OK, OutputError

_paths_option = click.option(
    "--rules", "rule_paths", multiple=True, metavar="PATH", help="Rule file or folder besides the built-in ones."
)
_no_builtin_option = click.option("--no-builtin", is_flag=True, help="Only the rules of --rules.")


@click.group("rules")
def rules_command() -> None:
    """List, show, check and write rules.

    \b
    Examples:
      onnxfuse rules list
      onnxfuse rules show rms-norm
      onnxfuse rules new --from model.onnx --output y --inputs x,w > my_rules/my-rule.yaml
      onnxfuse rules lint --rules my_rules
      onnxfuse rules test --rules my_rules my-rule --mutate
    """


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _load(rule_paths: tuple[str, ...], no_builtin: bool) -> Any:
    from onnxfuse import rules

    return rules.load(rule_paths, builtin=not no_builtin)


@rules_command.command("list")
@click.option("--stage", type=click.Choice(["lift", "fuse", "lower"]), help="Only rules of this stage.")
@_paths_option
@_no_builtin_option
@options.json_option
def list_command(stage: str | None, rule_paths: tuple[str, ...], no_builtin: bool, as_json: bool) -> int:
    """List all rules: stage, id, priority and what they do."""
    found = [p for p in _load(rule_paths, no_builtin) if stage in (None, p.stage)]
    order = {"lift": 0, "fuse": 1, "lower": 2}
    found.sort(key=lambda p: (order[p.stage], p.id))
    if as_json:
        rows = [{"id": p.id, "stage": p.stage, "priority": p.priority, "summary": p.spec.summary, "file": p.file}
                for p in found]  # fmt: skip
        render.data_json({"schema": 1, "rules": rows})
    else:
        lines = [(p.stage, p.id, p.priority, p.spec.summary) for p in found]
        render.data(render.table(lines, ("stage", "rule", "priority", "what it does")))
    return EXIT_OK


@rules_command.command("show")
@click.argument("rule")
@_paths_option
@options.json_option
def show_command(rule: str, rule_paths: tuple[str, ...], as_json: bool) -> int:
    """Show a rule: its pattern drawn, alternatives, guards, what it becomes, and its cases."""
    from onnxfuse.rules.drawing import draw, guards

    program = _load(rule_paths, False).get(rule)
    tests = program.source.tests()
    if as_json:
        near = [c.because for c in tests.no_match]
        render.data_json({
            "schema": 1, "id": program.id, "stage": program.stage, "priority": program.priority,
            "summary": program.spec.summary, "file": program.file, "pattern": draw(program),
            "guards": guards(program.spec), "cases": [c.name for c in tests.match], "near_misses": near,
        })  # fmt: skip
        return EXIT_OK
    render.data(
        f"{program.id} ({program.stage}, priority {program.priority})\n{program.spec.summary}\n{program.file}\n"
    )
    render.data(draw(program))
    render.data(f"\n{len(tests.match)} cases that match: {', '.join(c.name for c in tests.match)}")
    if tests.no_match:
        render.data(f"{len(tests.no_match)} near misses, stopped by: {', '.join(c.because for c in tests.no_match)}")
    return EXIT_OK


@rules_command.command("lint")
@click.argument("ids", nargs=-1, metavar="[RULE]…")
@_paths_option
@_no_builtin_option
@click.option(
    "--coverage/--no-coverage",
    default=True,
    show_default=True,
    help="Also run the cases to find alternatives that none of them uses.",
)
@options.json_option
def lint_command(
    ids: tuple[str, ...], rule_paths: tuple[str, ...], no_builtin: bool, coverage: bool, as_json: bool
) -> int:
    """Check rules without a model; RULEs limit what is reported.

    Exit codes: 0 nothing found; 1 findings; 2 a rule file does not load.
    """
    from onnxfuse.rewrite.vocabulary import vocabulary
    from onnxfuse.rules.lint import lint

    ruleset = _load(rule_paths, no_builtin)
    for rule_id in ids:
        ruleset.get(rule_id)
    rows = [
        {key: getattr(d, key) for key in ("id", "rule", "file", "line", "path", "message", "hint")}
        for d in lint(ruleset, vocabulary()) if not ids or d.rule in ids
    ]  # fmt: skip
    if coverage:
        rows += _not_covered([p for p in ruleset if not ids or p.id in ids])
    if as_json:
        render.data_json({"schema": 1, "findings": rows})
    else:
        for row in rows:
            render.data(f"{row['file']}:{row['line'] or 1}: {row['id']}: {row['message']}")
            if row["hint"]:
                render.data(f"  hint: {row['hint']}")
        render.note(f"{_plural(len(ids) or len(ruleset), 'rule')}, {_plural(len(rows), 'finding')}")
    return EXIT_FINDINGS if rows else EXIT_OK


def _not_covered(programs: list[Any]) -> list[dict[str, Any]]:
    from onnxfuse.ruletest import run_rule

    rows = []
    for program in programs:
        for choice in run_rule(program).untested:
            path = choice.split(".optional:")[0]
            message = f"no positive case uses `{choice}`"
            rows.append({"id": "alternative-not-tested", "rule": program.id, "file": program.file,
                         "line": program.line(path), "path": path, "message": message,
                         "hint": "add a `match` case that does"})  # fmt: skip
    return rows


@rules_command.command("test")
@click.argument("ids", nargs=-1, metavar="[RULE]…")
@_paths_option
@_no_builtin_option
@click.option("--mutate", is_flag=True, help="Also make near misses automatically; a match with a wrong result fails.")
@options.json_option
@options.verbosity_options
def test_command(
    ids: tuple[str, ...], rule_paths: tuple[str, ...], no_builtin: bool, mutate: bool, as_json: bool, quiet: bool,
    verbose: int,
) -> int:  # fmt: skip
    """Run the cases in the rule files: what must match matches and computes the same, what must not does not, for the
    reason given.

    Exit codes: 0 all pass; 1 a case fails, an alternative is not used by any case, or a mutant survives; 2 bad input.
    """
    from onnxfuse.ruletest import run_rule
    from onnxfuse.ruletest.mutate import mutate_rule

    ruleset = _load(rule_paths, no_builtin)
    programs = [ruleset.get(i) for i in ids] or list(ruleset)
    entries = []
    with counter.Counter("testing rules", enabled=not quiet) as bar:
        for number, program in enumerate(programs):
            report = run_rule(program)
            mutation = mutate_rule(program) if mutate else None
            entries.append(_entry(report, mutation))
            bar(number + 1, len(programs))
    passed = all(e["passed"] for e in entries)
    if as_json:
        render.data_json({"schema": 1, "passed": passed, "rules": entries})
    else:
        for entry in entries:
            _print_entry(entry, quiet)
        cases = sum(len(e["cases"]) for e in entries)
        verdict = "all pass" if passed else "failures"
        render.data(f"{_plural(len(entries), 'rule')}, {_plural(cases, 'case')}: {verdict}")
    return EXIT_OK if passed else EXIT_FINDINGS


def _entry(report: Any, mutation: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "rule": report.program.id,
        "file": report.program.file,
        "passed": report.passed and (mutation is None or mutation.passed),
        "cases": [
            {
                "name": r.case.name, "line": r.case.line, "outcome": str(r.outcome), "message": r.message,
                "passed": r.passed,
            }
            for r in report.results
        ],
        "untested": report.untested,
    }  # fmt: skip
    if mutation is not None:
        entry["mutants"] = {
            "rejected": mutation.rejected,
            "equivalent": mutation.equivalent,
            "invalid": mutation.invalid,
            "survivors": [{"case": c.name, "change": what, "wrong": wrong} for c, what, wrong in mutation.survivors],
        }
    return entry


def _print_entry(entry: dict[str, Any], quiet: bool) -> None:
    good = sum(c["passed"] for c in entry["cases"])
    text = f"{'ok  ' if entry['passed'] else 'FAIL'} {entry['rule']}: {good} of {len(entry['cases'])} cases"
    mutants = entry.get("mutants")
    if mutants:
        text += f"; mutants: {mutants['rejected']} rejected, {mutants['equivalent']} without effect on the result"
    if not (quiet and entry["passed"]):
        render.data(text)
    for case in entry["cases"]:
        if not case["passed"]:
            render.data(f"  {entry['file']}:{case['line']}: {case['name']}: {case['outcome']}: {case['message']}")
    for choice in entry["untested"]:
        render.data(f"  {entry['file']}: no positive case uses `{choice}`")
    for survivor in (mutants or {}).get("survivors", ()):
        render.data(f"  mutant of {survivor['case']} still matches ({survivor['change']}): {survivor['wrong']}")


@rules_command.command("new")
@click.option("--from", "model", required=True, metavar="MODEL", help="Model that holds the pattern.")
@click.option("--output", required=True, metavar="NAME", help="Value that the pattern computes.")
@click.option("--inputs", required=True, metavar="A,B,…", help="Values where the pattern ends.")
@click.option("--id", "rule_id", default="my-rule", show_default=True, metavar="ID", help="Id of the new rule.")
@click.option(
    "--stage",
    type=click.Choice(["lift", "fuse", "lower"]),
    default="lift",
    show_default=True,
    help="Stage of the new rule; the pattern is taken from the graph as that stage sees it.",
)
@click.option("-o", "--write", "path", metavar="FILE.yaml", help="Write a file instead of stdout.")
def new_command(model: str, output: str, inputs: str, rule_id: str, stage: str, path: str | None) -> int:
    """Print a rule skeleton made from a real subgraph of MODEL, with the subgraph as its first test.

    The graph is taken in canonical form, as rules see it; weights among the inputs become constants of the pattern.

    \b
    Example:
      onnxfuse rules new --from model.onnx --output /act/Mul_output_0 --inputs /fc/Add_output_0 --id my-act
    """
    from onnxfuse.skeleton import skeleton

    text = skeleton(model, output, [n.strip() for n in inputs.split(",") if n.strip()], rule_id=rule_id, stage=stage)
    if path is None:
        render.data(text)
        return EXIT_OK
    if Path(path).exists():
        raise OutputError(f"`{path}` exists already", hint="choose another name")
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write `{path}`: {error.strerror}") from error
    render.note(f"written: {path}")
    return EXIT_OK


@rules_command.command("schema")
def schema_command() -> int:
    """Print the JSON Schema of rule files, for editors.

    \b
    Example (the first line of a rule file then gives completion):
      onnxfuse rules schema > rule.schema.json
      # yaml-language-server: $schema=rule.schema.json
    """
    from onnxfuse.rules import schema

    render.data(json.dumps(json.loads(schema.text()), indent=1))
    return EXIT_OK
