"""Sections that the documents have only where the matrix has experiments for them: (section, heading, about)."""

SECTIONS = (
    (
        "lora",
        "LoRA forms",
        "An adapter merged into a second copy, kept beside the base (unmerged, LoRARequest), or merged into a "
        "checkpoint: what each costs in speed, in memory and in exactness. A refresh writes the merged copy anew from "
        "the pristine base.",
    ),
    (
        "four_bit",
        "4-bit",
        "The base in NF4 (bitsandbytes), the adapter beside it, for nothing merges into packed weights.",
    ),
    (
        "group",
        "Group sampling",
        "Several samples of every prompt, as GRPO draws them: an engine that shares what samples of a prompt have in "
        "common computes and keeps a prompt once. What a round has cached is forgotten before the next.",
    ),
    (
        "uneven",
        "Uneven lengths",
        "More sequences than may run at once, each with a length of its own, the same list for every backend: what "
        "counts is how fast a place that falls free is taken.",
    ),
)
