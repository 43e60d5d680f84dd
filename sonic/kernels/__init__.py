"""The eight steps of a Mixture-of-Experts layer (paper section 2.1), one file per step.

Every file holds a portable Triton kernel with its launcher, a plain-torch twin of the same signature and a cost model.
"""
