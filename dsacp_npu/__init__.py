"""The mirror of dsacp_ref over torch, and what runs it on Ascend NPUs."""
