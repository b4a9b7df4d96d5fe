"""Old name of `tangram_hpc.libra.live.core_trainer`, kept for one release."""

from __future__ import annotations

from .core_trainer import CoreTrainer as HybridCore

__all__ = ["HybridCore"]
