"""Questions of Natural Questions Open that ship with the package: see SOURCE.md."""
