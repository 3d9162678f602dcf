// The control does not compile, so that no section of this file would mean anything.
int wrong() { return no_such_name; }
