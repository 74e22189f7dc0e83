"""End-to-end memory networks (Sukhbaatar et al. 2015) and the bAbI tasks (Weston et al. 2015)."""
