"""RunPod's identifiers of cards in the words that the rest of Echo2 uses (vast.ai's).

Invariant: pure; a card that no table knows keeps its name, without the maker's.
"""

from __future__ import annotations

from collections.abc import Mapping

_SPECIAL: Mapping[str, str] = {
    "NVIDIA A100 80GB PCIe": "A100 PCIE",
    "NVIDIA A100-SXM4-80GB": "A100 SXM4",
    "NVIDIA A100-SXM4-40GB": "A100 SXM4",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H100 PCIe": "H100 PCIE",
    "NVIDIA RTX 6000 Ada Generation": "RTX 6000Ada",
    "NVIDIA RTX 5000 Ada Generation": "RTX 5000Ada",
    "NVIDIA RTX 4000 Ada Generation": "RTX 4000Ada",
    "NVIDIA RTX 2000 Ada Generation": "RTX 2000Ada",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX PRO 6000 WS",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX PRO 6000 S",
    "Tesla V100-PCIE-16GB": "Tesla V100",
    "Tesla V100-FHHL-16GB": "Tesla V100",
    "Tesla V100-SXM2-16GB": "Tesla V100",
    "Tesla V100-SXM2-32GB": "Tesla V100",
}
_MAKERS = ("NVIDIA GeForce ", "NVIDIA ")


def gpu_name(gpu_id: str) -> str:
    """The card's name for RunPod's `gpu.id`."""
    plain = " ".join(gpu_id.split())
    if plain in _SPECIAL:
        return _SPECIAL[plain]
    for maker in _MAKERS:
        if plain.startswith(maker) and len(plain) > len(maker):
            return plain.removeprefix(maker)
    return plain
