"""depthlab.runs"""
