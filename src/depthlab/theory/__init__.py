"""depthlab.theory"""
