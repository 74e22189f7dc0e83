"""The ModernBERT decoder (Weller et al. 2025)."""
