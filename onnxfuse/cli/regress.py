"""`onnxfuse regress`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from onnxfuse.cli import counter, options, render
from onnxfuse.errors import EXIT_FINDINGS, EXIT_OK, UsageError


@click.command("regress")
@click.argument("config", metavar="CONFIG.yaml")
@click.option("--update", is_flag=True, help="Write what is found to the baseline file instead of comparing with it.")
@click.option("--baseline", metavar="FILE.json", help="Baseline file; default: the one that CONFIG names.")
@click.option("--model", "names", multiple=True, metavar="NAME", help="Only this model; may be given several times.")
@click.option("--junit", metavar="FILE.xml", help="Write the results as JUnit XML.")
@click.option("--markdown", metavar="FILE.md", help="Append a summary in Markdown (for $GITHUB_STEP_SUMMARY).")
@options.json_option
@options.verbosity_options
def regress_command(
    config: str, update: bool, baseline: str | None, names: tuple[str, ...], junit: str | None, markdown: str | None,
    as_json: bool, quiet: bool, verbose: int,
) -> int:  # fmt: skip
    """Check that models still fuse, still compute the same and are still as fast as CONFIG.yaml says.

    Counts of fusions, blocks and ops come from CONFIG, or from a baseline file that --update writes. A lost fusion, a
    changed op count, a mismatch with the original or a time ratio above `max_ratio` fails.

    \b
    Examples:
      onnxfuse regress regress.yaml --update
      onnxfuse regress regress.yaml --junit results.xml --markdown "$GITHUB_STEP_SUMMARY"

    Exit codes: 0 all as expected; 1 something is not; 2 the configuration is wrong.
    """
    from onnxfuse import regress
    from onnxfuse.destination import check_files
    from onnxfuse.regress import outputs
    from onnxfuse.regress.config import read_baseline, write_baseline
    from onnxfuse.replacement import write_text

    settings = regress.load(Path(config))
    chosen = [m for m in settings.models if not names or m.name in names]
    unknown = set(names) - {m.name for m in settings.models}
    if unknown:
        known = ", ".join(m.name for m in settings.models)
        raise UsageError(f"no model `{min(unknown)}` in `{config}`", hint=f"it has {known}")
    store = Path(baseline) if baseline is not None else settings.baseline
    if update and store is None:
        raise UsageError("`--update` needs a baseline file", hint="name it with --baseline, or in the configuration")
    check_files({"--junit": junit, "--baseline": store if update else None}, {"CONFIG": config})
    recorded = read_baseline(store) if store is not None else {}
    results = []
    with counter.Counter("checking models", enabled=not quiet) as bar:
        for number, model in enumerate(chosen):
            results.append(regress.run_model(model, None if update else recorded.get(model.name)))
            bar(number + 1, len(chosen))
    if update and store is not None:
        write_baseline(store, {**recorded, **{r.name: r.found for r in results if r.found}})
        render.note(f"written: {store}")
    if junit is not None:
        write_text(Path(junit), outputs.junit(results))
    if markdown is not None:
        with open(markdown, "a", encoding="utf-8") as file:
            file.write(outputs.markdown(results))
    passed = all(r.passed for r in results)
    if as_json:
        render.data_json({"schema": 1, "passed": passed, "models": [r.to_json() for r in results]})
    else:
        _print(results, quiet)
    return EXIT_OK if passed else EXIT_FINDINGS


def _print(results: list[Any], quiet: bool) -> None:
    columns = ("fusions", "blocks", "ops", "verify", "speed")
    rows = []
    for result in results:
        states = {c.name: c.status for c in result.checks}
        word = "ok" if result.passed else "FAILED"
        rows.append((result.name, word, result.found.get("nodes", ""), *(states.get(c, "") for c in columns)))
    if not quiet or not all(r.passed for r in results):
        render.data(render.table(rows, ("model", "", "nodes", *columns)))
    for result in results:
        for check in result.checks:
            if check.status == "failed":
                render.data(f"{result.name}: {check.name}: {check.message}")
