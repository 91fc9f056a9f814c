"""From the results of coverage.py: shares by kind of block, and the page docs/reference/coverage.md."""

from __future__ import annotations

from collections import Counter
from typing import Any

from coverage_tools import OURS, TOLERANCE, TOOLS

#: What is reported, as sums of keys of the corpus's manifest; a number is a size of `shared_input_matmul_groups`.
KINDS: dict[str, tuple[str, ...]] = {
    "RMSNorm": ("rmsnorm",),
    "LayerNorm": ("layernorm",),
    "skip + norm": ("skip_rmsnorm", "skip_layernorm"),
    "GELU, erf": ("act_gelu_erf",),
    "GELU, tanh": ("act_gelu_tanh",),
    "GELU, quick": ("act_quick_gelu",),
    "SiLU": ("act_silu",),
    "SwiGLU": ("swiglu",),
    "GeGLU": ("geglu",),
    "ReGLU": ("reglu",),
    "matmul + bias": ("matmul_bias",),
    "matmul + bias + activation": (
        "matmul_bias_act_gelu_erf", "matmul_bias_act_gelu_tanh", "matmul_bias_act_quick_gelu", "matmul_bias_act_relu",
        "matmul_bias_act_tanh",
    ),
    "matmul + activation": ("matmul_act_silu", "matmul_act_gelu_tanh", "matmul_act_relu"),
    "Q/K/V in one matmul": ("qkv_shared_input_groups",),
    "two matmuls of one input in one (gate/up)": ("2",),
    "four matmuls of one input in one": ("4",),
    "rotary embedding": ("rope",),
    "attention": ("attention",),
}  # fmt: skip

#: Native ops of the exported file that already are the block.
_NATIVE = {
    "rmsnorm": ("RMSNormalization", "SimplifiedLayerNormalization"),
    "layernorm": ("LayerNormalization",),
    "act_gelu_erf": ("Gelu",),
    "act_gelu_tanh": ("Gelu",),
    "act_silu": ("Swish",),
    "matmul_bias": ("Gemm",),
    "rope": ("RotaryEmbedding",),
    "attention": ("Attention",),
}
MARK = "<!-- made by benchmarks/coverage.py; do not edit -->"


def expected(record: dict[str, Any]) -> dict[str, int]:
    """Blocks of each kind in the source model that are not one op in the exported file."""
    if record.get("already_fused"):
        return {}
    return {kind: n for kind, keys in KINDS.items() if (n := sum(_wanted(record, key)[1] for key in keys)) > 0}


def found(record: dict[str, Any], blocks: dict[str, Any]) -> dict[str, int]:
    """How many of them a tool found."""
    result = {}
    for kind in expected(record):
        count = 0
        for key in KINDS[kind]:
            already, missing = _wanted(record, key)
            count += max(min(_counted(blocks, key) - already, missing), 0)
        result[kind] = count
    return result


def _wanted(record: dict[str, Any], key: str) -> tuple[int, int]:
    """How many blocks of a key are one op already, and how many are not."""
    wanted = record["expected"]
    total = int((wanted.get("shared_input_matmul_groups") or {}).get(key, 0) if key.isdigit() else wanted.get(key, 0))
    already = min(total, sum(record["native_ops"].get(op, 0) for op in _NATIVE.get(key, ())))
    return already, total - already


def _counted(blocks: dict[str, Any], key: str) -> int:
    if key.isdigit():
        return int(blocks.get("shared_input_matmul_groups", {}).get(key, 0))
    count = int(blocks.get(key, 0))
    if key.startswith("matmul_act_"):  # a product whose bias came from a norm's shift counts for the key without
        count += int(blocks.get(key.replace("matmul_", "matmul_bias_", 1), 0))
    return count


def totals(rows: list[dict[str, Any]], tool: str) -> dict[str, dict[str, int]]:
    """By kind: expected, found, right (found in files whose result is right), written (right, in the file)."""
    result = {kind: dict.fromkeys(("expected", "found", "right", "written"), 0) for kind in KINDS}
    for row in (r for r in rows if r["tool"] == tool):
        right = row["state"] in ("right", "structure")
        for kind, count in row["expected"].items():
            entry = result[kind]
            entry["expected"] += count
            entry["found"] += row["found"].get(kind, 0)
            entry["right"] += row["found"].get(kind, 0) if right else 0
            entry["written"] += row["written"].get(kind, 0) if right else 0
    return result


def page(results: dict[str, Any]) -> str:
    """The page as text; a pure function of the results."""
    rows = results["rows"]
    files = len({row["file"] for row in rows})
    tools = [tool for tool in TOOLS if any(row["tool"] == tool for row in rows)]
    by_tool = {tool: totals(rows, tool) for tool in tools}
    lines = [
        "# Coverage", "", MARK, "",
        f"Which transformer blocks of {files} exported models each optimizer finds, and whether the model it",
        "writes still gives the outputs of the exported one. Expected are the blocks of the source models that",
        "are not one op in the exported file already. A block is found when nothing of it is left as a separate",
        "op; for the other tools, bias and activation in an op behind a MatMul (BiasGelu, SkipLayerNormalization",
        "with a bias, …) count too. Right: found in a file whose outputs on ONNX Runtime's CPU provider match the",
        f"stored ones on two input sets (relative to the largest value: {TOLERANCE['float32']:g} in float32,",
        f"{TOLERANCE['float16']:g} in half precision). bfloat16, which that provider hardly computes in, and",
        "results for CUDA without a CPU kernel are judged by their structure where they cannot be run in float32.",
        "", "Made by `" + results["command"] + "` with " + ", ".join(results["versions"]) + ".",
        "", "## Found and right", "",
        "In brackets: found in all, where some of it is in a file that came out wrong. onnxfuse is counted after its",
        "stage `fuse`; for what it writes, see below.", "",
        "| block | expected | " + " | ".join(tools) + " |", "|---|--:|" + "--:|" * len(tools),
    ]
    for kind in KINDS:
        cells = [by_tool[tool][kind] for tool in tools]
        if cells[0]["expected"]:
            lines.append(f"| {kind} | {cells[0]['expected']} | " + " | ".join(map(_share, cells)) + " |")
    lines += [
        "", "## Outcomes", "", "| tool | right | structure | wrong | tool failed | nodes, before → after | median s |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for tool in tools:
        own = [row for row in rows if row["tool"] == tool]
        states = Counter(row["state"] for row in own)
        done = [row for row in own if row["state"] != "failed"]
        before, after = (sum(row["nodes"][i] for row in done) for i in (0, 1))
        seconds = sorted(row["seconds"] for row in done)
        lines.append(
            f"| {tool} | {states['right']} | {states['structure']} | {states['wrong']} | {states['failed']} | "
            f"{before} → {after} | {seconds[len(seconds) // 2] if seconds else 0:.2f} |"
        )
    for tool in (t for t in tools if t in OURS):
        lines += _written(tool, [r for r in rows if r["tool"] == tool], by_tool[tool])
    lines += ["", "## What is missed or went wrong", ""]
    for tool in tools:
        lines += _problems(tool, [r for r in rows if r["tool"] == tool])
    return "\n".join(lines).rstrip() + "\n"


def _share(entry: dict[str, int]) -> str:
    right, all_found = (100 * entry[k] / entry["expected"] for k in ("right", "found"))
    return f"{right:.0f}%" if entry["right"] == entry["found"] else f"{right:.0f}% ({all_found:.0f}%)"


def _written(tool: str, rows: list[dict[str, Any]], total: dict[str, dict[str, int]]) -> list[str]:
    """What the written file holds where the target has no kernel, or another spelling was measured to be faster."""
    lines = ["", f"## As written: {tool}", ""]
    less = [(kind, e) for kind, e in total.items() if e["written"] < e["right"]]
    if not less:
        return [*lines, "All that was found is one op in the written files."]
    lines += ["| block | found and right | one op as written |", "|---|--:|--:|"]
    lines += [f"| {kind} | {entry['right']} | {entry['written']} |" for kind, entry in less]
    reasons: Counter[tuple[str, str]] = Counter()
    for row in rows:
        for entry in row["apart"]:
            reasons[entry["op"], entry["reason"]] += entry["count"]
    lines += ["", "| taken apart | how many | why |", "|---|--:|---|"]
    lines += [f"| `{op}` | {count} | {reason} |" for (op, reason), count in reasons.most_common()]
    return lines


def _problems(tool: str, rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        if row["state"] in ("wrong", "failed"):
            lines.append(f"- `{row['file']}`: {row['state']}: {_plain(row['error'])}")
        elif tool in OURS:
            missing = [f"{k} {row['found'].get(k, 0)}/{n}" for k, n in row["expected"].items()
                       if row["found"].get(k, 0) < n]
            if missing:
                lines.append(f"- `{row['file']}`: {', '.join(missing)}")
    return [f"### {tool}", "", *(lines or ["Nothing."]), ""]


def _plain(text: str) -> str:
    return text.replace("|", "/").replace("<", "(").replace(">", ")")
