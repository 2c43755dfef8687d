"""The planning problem: tensors, intervals between uses, liveness, tiling variants."""
