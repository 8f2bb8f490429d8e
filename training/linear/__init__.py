"""Linear node scorers over sparse features: XR-Linear (Chang et al. 2021), and methods that make it fast to train."""
