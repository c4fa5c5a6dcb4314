"""depthlab.diagnostics"""
