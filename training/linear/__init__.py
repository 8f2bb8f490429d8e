"""Linear node scorers over sparse features: XR-Linear (Chang et al. 2021) and what makes it fast to train."""
