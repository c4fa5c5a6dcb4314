"""depthlab.continuity"""
