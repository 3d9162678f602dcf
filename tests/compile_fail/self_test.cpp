// Sections on which the harness itself must complain; tests/compile_fail/CMakeLists.txt says with
// which words.

#if defined(FAIL_compiles)
// expect: anything
int fine() { return 1; }
#endif

#if defined(FAIL_for_another_reason)
// expect: all_reduce<axis> first
#include "moesh/no_such_header.h"
#endif

#if defined(FAIL_one_text_of_two)
// expect: no_such_name
// expect: all_reduce<axis> first
int wrong() { return no_such_name; }
#endif
