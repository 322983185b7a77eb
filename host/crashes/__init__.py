"""Records of stubs that died: what ended them, what they ran, and what they printed last."""
