"""The report of `optimize`, as data (JSON) and as text. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx

SCHEMA = 1

#: What the keys of `blocks` are called for people; keys without an entry are shown as they are.
_BLOCK_NAMES = {
    "rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "skip_rmsnorm": "skip + RMSNorm",
    "skip_layernorm": "skip + LayerNorm", "rope": "rotary embedding", "attention": "attention",
    "swiglu": "SwiGLU", "geglu": "GeGLU", "reglu": "ReGLU", "matmul": "linear layer",
    "qkv_shared_input_groups": "packed Q/K/V",
}


def count_ops(proto: onnx.ModelProto) -> dict[str, int]:
    """`{"domain::Op": n}` over all graphs, without constants; ONNX's own domain is `ai.onnx`."""
    counts: Counter[str] = Counter()

    def visit(nodes: Iterable[onnx.NodeProto]) -> None:
        for node in nodes:
            if node.op_type != "Constant":
                counts[f"{node.domain or 'ai.onnx'}::{node.op_type}"] += 1
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    visit(attribute.g.node)

    visit(proto.graph.node)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def fusions(applied: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    """`[{rule, stage, count}]` from (rule, stage) pairs, in order of first use."""
    counts = Counter(applied)
    return [{"rule": rule, "stage": stage, "count": count} for (rule, stage), count in counts.items()]


def build(
    *, model: str, output: str | None, target: str, proto: onnx.ModelProto, nodes_before: int,
    applied: Sequence[tuple[str, str]], blocks: Mapping[str, Any], blocks_lowered: Mapping[str, Any],
    lowering: Mapping[str, Any], verify: Mapping[str, Any], reverted: Sequence[Mapping[str, Any]],
    seconds: Mapping[str, float], sizes: Mapping[str, int], weights: Mapping[str, int], options: Mapping[str, Any],
    kv_cache: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The JSON report, schema 1; docs/reference/report.md describes the keys."""
    ops = count_ops(proto)
    return {
        "schema": SCHEMA,
        "model": model,
        "output": output,
        "target": target,
        "options": dict(options),
        "nodes": {"before": nodes_before, "after": sum(ops.values())},
        "bytes": dict(sizes),
        "weights": dict(weights),
        "fusions": fusions(applied),
        "ops_after": ops,
        "blocks": dict(blocks),
        "blocks_lowered": dict(blocks_lowered),
        "lowering": dict(lowering),
        "kv_cache": None if kv_cache is None else dict(kv_cache),
        "verify": dict(verify),
        "reverted": [dict(entry) for entry in reverted],
        "seconds": dict(seconds),
    }


def block_name(key: str) -> str:
    """What a block key is called for people."""
    if key in _BLOCK_NAMES:
        return _BLOCK_NAMES[key]
    if key.startswith("matmul_"):
        return "linear layer + " + key.removeprefix("matmul_").replace("act_", "").replace("_", " + ", 1)
    return key.removeprefix("act_").replace("_", " ")


def summary(report: Mapping[str, Any]) -> str:
    """The report in a few lines of text."""
    nodes = report["nodes"]
    lines = [f"{report['model']}: {nodes['before']} nodes -> {nodes['after']} (target {report['target']})"]
    if report["fusions"]:
        width = max(len(f["rule"]) for f in report["fusions"])
        lines += [f"  {f['stage']:<5} {f['rule']:<{width}} {f['count']:>4}" for f in report["fusions"]]
    else:
        lines.append("  no rule applied")
    if report["weights"]["replaceable"]:
        lines.append("  {replaceable} of {count} weights are inputs of the graph, too: a caller may replace them, so "
                     "that nothing is fused with them".format_map(report["weights"]))
        lines.append("    (onnxruntime.tools.remove_initializer_from_input makes them constants)")
    apart: dict[str, int] = {}
    for entry in report["lowering"].get("taken_apart", ()):
        apart[entry["op"].rpartition("::")[2]] = apart.get(entry["op"].rpartition("::")[2], 0) + entry["count"]
    if apart:
        ops = ", ".join(f"{op} {count}" for op, count in apart.items())
        lines.append(f"  taken apart again for the target: {ops} (`onnxfuse explain` says why)")
    for entry in report["reverted"]:
        sites = entry["sites"]
        what = "everywhere" if sites is None else f"at {', '.join(sites)}"
        lines.append(f"  reverted {entry['rule']} {what}: {entry['problem']}")
    elsewhere = report["target"].startswith("cuda") and report["verify"].get("provider") == "cpu"
    lines.append(verify_line(report["verify"]) + (", run on CPU" if elsewhere else ""))
    if report.get("kv_cache"):
        lines.append(cache_line(report["kv_cache"]))
    if report["output"]:
        lines.append(f"written: {report['output']}")
    return "\n".join(lines)


def cache_line(cache: Mapping[str, Any]) -> str:
    """One line about caches in shared buffers."""
    fed = f"tokens counted by `{cache['mask']}`" if cache["mask"] else ""
    if cache["added_inputs"]:
        fed = "new inputs " + ", ".join(f"`{name}`" for name in cache["added_inputs"])
    text = f"cache: {len(cache['caches'])} buffers of `{cache['length']}` rows, past and present in one"
    text += f"; {fed}" if fed else ""
    generation = cache["generation"]
    if generation["status"] in ("passed", "structure-only"):
        text += f"; generates as the original in {len(generation['runs'])} runs"
    return text


def verify_line(verify: Mapping[str, Any]) -> str:
    """One line about the verification."""
    status = verify["status"]
    if status == "skipped":
        return "not verified (--no-verify)"
    if status in ("failed", "unverified"):
        return f"verification {status}: {'; '.join(verify['problems'][:2])}"
    worst = max((o for o in verify["outputs"]), key=lambda o: o["error"], default=None)
    text = f"verified on {len(verify['sets'])} input sets against {verify['oracle']}"
    if status == "structure-only":
        text += " (structure only: run in float32)"
    if worst is not None:
        text += f": error {worst['error']:.1e}, unfused {worst['unfused_error']:.1e}"
    return text
