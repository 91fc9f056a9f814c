"""`onnxfuse explain`."""

from __future__ import annotations

from typing import Any

import click

from onnxfuse.cli import options, render
from onnxfuse.errors import EXIT_FINDINGS, EXIT_OK


@click.command("explain")
@click.argument("model")
@click.option("--rule", metavar="ID", help="Only this rule, with every site that it was tried at.")
@click.option("--node", metavar="NAME", help="Only what concerns this node (name of the node or of an output).")
@click.option("--output", metavar="NAME", help="The same as --node, for the name of a value.")
@click.option("--target", default="cpu", show_default=True, metavar="cpu|cuda[:smNN]|auto", help="What to fuse for.")
@click.option(
    "--rules", "rule_paths", multiple=True, metavar="PATH", help="Rule file or folder besides the built-in ones."
)
@click.option("--disable", multiple=True, metavar="RULE", help="A rule that must not fire; may be given several times.")
@click.option("--exclude-node", multiple=True, metavar="NAME", help="A node (or output) that no rule may touch.")
@click.option("--verify", is_flag=True, help="Also verify, and say which fusions were taken back.")
@click.option("--limit", type=click.IntRange(1), default=10, show_default=True, help="Show so many near misses.")
@click.option("--fail-on-miss", is_flag=True, help="Exit with 1 when there is a near miss.")
@options.json_option
def explain_command(
    model: str, rule: str | None, node: str | None, output: str | None, target: str, rule_paths: tuple[str, ...],
    disable: tuple[str, ...], exclude_node: tuple[str, ...], verify: bool, limit: int, fail_on_miss: bool,
    as_json: bool,
) -> int:  # fmt: skip
    """Show why rules did not fire on MODEL: the furthest constraint that each of them reached.

    The same code as in `optimize` runs, on the canonical form of the model; what each rule failed at is written down,
    with its line in the rule file. Near misses come first where a block was left in pieces; equal ones are folded.

    \b
    Examples:
      onnxfuse explain model.onnx
      onnxfuse explain model.onnx --rule rms-norm
      onnxfuse explain model.onnx --node /layers.0/mlp/Mul --json

    Exit codes: 0 fine; 1 there are near misses, with --fail-on-miss; 2 bad input.
    """
    from onnxfuse import pipeline
    from onnxfuse.explanation import explain

    chosen = pipeline.Options(
        target=pipeline.resolve_target(target), rules=rule_paths, disable=frozenset(disable),
        exclude_nodes=frozenset(exclude_node),
    )  # fmt: skip
    found = explain(model, chosen, rule=rule, node=node or output)
    if verify:
        from onnxfuse.optimizer import optimize

        result = optimize(
            model, target=target, rules=rule_paths, disable=disable, exclude_nodes=exclude_node, allow_unverified=True
        )
        found.reverted = result.report["reverted"]
    if as_json:
        render.data_json(found.to_json())
    else:
        _print(found, rule, limit)
    open_misses = [m for m in found.misses if not m.taken_by]
    return EXIT_FINDINGS if fail_on_miss and open_misses else EXIT_OK


def _print(found: Any, rule: str | None, limit: int) -> None:
    _print_outcomes(found, rule)
    for miss in found.misses[:limit]:
        render.data("")
        _print_miss(miss)
    if len(found.misses) > limit:
        render.data(f"\n{len(found.misses) - limit} more; --limit shows them")
    for entry in found.taken_apart:
        render.data(f"\ntaken apart for the target: {entry['op']} x {entry['count']}: {entry['reason']}")
    for entry in found.reverted:
        where = "everywhere" if entry["sites"] is None else f"at {', '.join(entry['sites'])}"
        render.data(f"\ntaken back by verification: {entry['rule']} {where}: {entry['problem']}")
    if not found.misses and rule is None:
        render.data("\nno near misses")


def _print_outcomes(found: Any, rule: str | None) -> None:
    if rule is not None:
        (outcome,) = found.rules
        text = f"{outcome.rule}: {_count(outcome.matches, 'match', 'matches')}, "
        text += _count(outcome.misses, "site where it failed", "sites where it failed")
        if outcome.taken:
            text += f", {_count(outcome.taken, 'site', 'sites')} taken by another rule"
        render.data(text)
        if outcome.gate is not None:
            expected = f"needs {outcome.gate.expected}: " if outcome.gate.expected else ""
            render.data(f"  not tried: {expected}{outcome.gate.found} ({outcome.gate.check})")
        return
    fired = [r for r in found.rules if r.matches]
    render.data(
        f"{found.model}: {sum(r.matches for r in fired)} rewrites by {len(fired)} rules (target {found.target})"
    )
    if fired:
        render.data("  " + ", ".join(f"{r.rule} {r.matches}" for r in fired))


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _print_miss(miss: Any) -> None:
    more = f" and {miss.count - 1} more" if miss.count > 1 else ""
    render.data(f"{miss.rule} at {miss.node}{more}")
    if miss.taken_by:
        render.data(f"  taken by {miss.taken_by}")
    _print_reason(miss.file, miss.reason)
    if miss.alternatives:
        render.data(f"  and none of {len(miss.alternatives)} other alternatives:")
        for other in miss.alternatives:
            place = f"{miss.file}:{other.line}" if other.line else miss.file
            expected = f"expected {other.expected}, " if other.expected else ""
            render.data(f"    {place}  {other.check}: {expected}found {other.found}")
    names = {k: v for k, v in miss.bound.items() if not k.startswith("$")}
    if names:
        render.data("  bound: " + ", ".join(f"{k} = {v}" for k, v in list(names.items())[:8]))


def _print_reason(file: str, reason: Any) -> None:
    place = f"{file}:{reason.line}" if reason.line else file
    render.data(f"  {place}  {reason.check}")
    if reason.expected:
        render.data(f"    expected  {reason.expected}")
    render.data(f"    found     {reason.found}")
