"""An encoder trained by connectionist temporal classification (Graves et al. 2006)."""
