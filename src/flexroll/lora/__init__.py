"""LoRA for rollouts: the canonical adapter, merging from a pristine copy, and the proof that nothing drifts."""
