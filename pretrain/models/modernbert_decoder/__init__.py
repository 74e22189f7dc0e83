"""The causal twin of ModernBERT (Weller et al. 2025)."""
