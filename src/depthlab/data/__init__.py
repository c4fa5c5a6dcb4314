"""depthlab.data"""
