// Compiles the precompiled header, which the other targets share.
