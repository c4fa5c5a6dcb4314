"""depthlab.residuals"""
