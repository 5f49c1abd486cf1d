"""Second sources for Hopper GPUs, in Gluon: warps with roles of their own, which portable Triton cannot say."""
