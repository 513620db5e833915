"""The model card of an exported model: what it gained, how it was made, from what.

Pure text from manifests. Local paths are blanked: a card is made to be published.
"""

from __future__ import annotations

from typing import Any

from ratchet.config.base import setting_lines
from ratchet.config.run import PromptFormat
from ratchet.prompts import parts
from ratchet.store.lineage import Ancestry
from ratchet.store.manifest import Manifest
from ratchet.store.store import Artifact, Store

Row = dict[str, Any]


def comparison_of(store: Store, artifact: Artifact) -> Artifact | None:
    """The newest comparison in which the artifact's model is the one judged, else one that holds
    it, else None."""
    found: list[Artifact] = []
    judged: list[Artifact] = []
    for item in store.artifacts():
        if item.manifest.stage != "compare":
            continue
        for variant, parent in item.manifest.parents.items():
            evaluation = store.find(parent.stage, parent.key)
            model = None if evaluation is None else evaluation.manifest.parents.get("model")
            if model is not None and model.key == artifact.manifest.key:
                last = variant_order(item.manifest)[-1]
                (judged if variant == last else found).append(item)
    return next(iter(judged or found), None)


def variant_order(comparison: Manifest) -> list[str]:
    """Names of the variants, the one that is judged last; earlier releases called them arms."""
    summary = comparison.summary
    return summary.get("variant_order") or summary["arm_order"]


def start_of(item: Ancestry) -> Manifest | None:
    """The manifest of the model everything started from; None when it is gone."""
    if item.stage == "model":
        return item.manifest
    return next((found for parent in item.parents if (found := start_of(parent))), None)


def _blank(value: Any) -> Any:
    """The value with absolute paths blanked."""
    if isinstance(value, dict):
        return {name: _blank(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_blank(inner) for inner in value]
    return "(local)" if isinstance(value, str) and value.startswith("/") else value


def _every(item: Ancestry, seen: dict[str, Ancestry]) -> dict[str, Ancestry]:
    """An ancestry as a list by key, ancestors first."""
    for parent in item.parents:
        _every(parent, seen)
    seen.setdefault(item.key, item)
    return seen


def _lineage(tree: Ancestry) -> list[str]:
    lines = ["| stage | key | begun (UTC) | device-seconds | made from |", "|---|---|---|---:|---|"]
    for item in _every(tree, {}).values():
        made = ", ".join(f"{parent.stage} `{parent.key[:8]}`" for parent in item.parents)
        if item.manifest is None:
            lines.append(f"| {item.stage} | `{item.key}` | gone | | {made} |")
            continue
        found = item.manifest
        lines.append(
            f"| {item.stage} | `{item.key}` | {found.started_at[:16].replace('T', ' ')} | "
            f"{found.device_seconds:.0f} | {made} |"
        )
    return lines


def _recipe(tree: Ancestry) -> list[str]:
    """The settings of all stages by section, each once; what was left out is left out here."""
    sections: dict[str, Any] = {}
    for item in _every(tree, {}).values():
        if item.manifest is not None:
            sections |= item.manifest.config
    lines = [line for line in setting_lines(_blank(sections)) if not line.endswith(" = null")]
    return ["```", *lines, "```"]


def _usage(form: str, base: str | None) -> list[str]:
    """How the model is asked, and loaded; `base` says where an adapter's base model lies."""
    asked = [f"{role}:\n{text}" for role, text in parts(PromptFormat(form))]
    load = "model = AutoModelForCausalLM.from_pretrained(FOLDER)"
    if base is not None:
        where = f'"{base}"' if "/" in base else f'FOLDER + "/{base}"'
        load = (
            f"model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({where}), "
            "FOLDER)"
        )
    return [
        f"It was trained and measured with prompt format `{form}` through its chat template:",
        "",
        "````",
        *asked,
        "````",
        "",
        "```python",
        load,
        "tokenizer = AutoTokenizer.from_pretrained(FOLDER)",
        "```",
    ]


def _said(comparison: Manifest) -> str:
    """The comparison in words; earlier releases wrote the verdicts on one bold line."""
    verdict, _, tables = comparison.markdown.partition("\n\n")
    if not verdict.startswith("**"):
        return comparison.markdown
    return "\n".join([*(f"- {part}" for part in verdict.strip("*").split(" | ")), "", tables])


def model_card(
    name: str,
    tree: Ancestry,
    comparison: Manifest | None,
    *,
    base: str | None,
    check: Row,
) -> str:
    """README.md of an exported model.

    `tree` is the ancestry of the exported artifact, `comparison` the manifest of a comparison that
    holds it, `base` says of an adapter where its base model lies (None for a whole model), `check`
    are the figures of the comparison between the export and the trained model.
    """
    made = tree.manifest
    assert made is not None, "what is exported exists"
    start = start_of(tree)
    source = None if start is None else start.summary.get("source")
    public = source if isinstance(source, str) and "/" in source and source[0] != "/" else None
    head = ["---", "library_name: peft" if base is not None else "library_name: transformers"]
    if public is not None:
        head.append(f"base_model: {public}")
    head += ["pipeline_tag: text-generation", "tags:", "- math", "- rlvr", "- ratchet", "---"]
    what = "LoRA adapter" if base is not None else "model"
    origin = public or ("a local model" if source is None or "/" in source else source)
    lines = [*head, "", f"# {name}", "", f"A {what} made from {origin} by Ratchet."]
    lines += ["", "## What was gained", ""]
    if comparison is None:
        lines.append("It has not been evaluated yet.")
    else:
        order = ", ".join(variant_order(comparison))
        lines += [
            _said(comparison),
            "",
            f"Variants: {order}. Greedy answers, shares of 1; strict: ",
        ]
        lines[-1] += "right and in the demanded format, lenient: right in any format."
    lines += ["", "## How to ask it", "", *_usage(made.config["prompt"]["format"], base)]
    lines += [
        "",
        f"Loaded again it differs from the trained model by {check['mean_difference']:.1e} nats "
        f"per token on average, {check['max_difference']:.1e} at most, over "
        f"{check['num_tokens']:,} tokens.",
    ]
    lines += ["", "## Recipe", "", *_recipe(tree), "", "## Lineage", "", *_lineage(tree)]
    versions = ", ".join(f"{package} {found}" for package, found in made.packages.items())
    lines += ["", f"Versions: {versions}. Code {made.code_version}, seed {made.seed}."]
    return "\n".join(lines) + "\n"
