"""fastattn in models written for something else: torch's modules, Hugging Face transformers."""

from fastattn.integrations.replace import Replacements, replace_attention
from fastattn.integrations.sdpa import patch_sdpa

__all__ = ["Replacements", "patch_sdpa", "replace_attention"]
