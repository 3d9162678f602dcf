// Mistakes with token positions: only SequenceShard turns a local one into a global one.
#include "moesh/types/token.h"

namespace moesh {

// A table by global token, as routing records have it.
std::int64_t expert_of(GlobalToken t);

#if defined(FAIL_local_token_as_global)
// expect: a shard knows the way: shard.global(t)
std::int64_t lookup(LocalToken t) { return expert_of(t); }
#else
std::int64_t lookup(const SequenceShard& shard, LocalToken t) { return expert_of(shard.global(t)); }
#endif

#if defined(FAIL_number_as_global_token)
// expect: to 'GlobalToken'
std::int64_t lookup_by_number(std::int64_t i, std::int64_t rank, std::int64_t num_local) {
  return expert_of(i + rank * num_local);
}
#else
std::int64_t lookup_by_number(const SequenceShard& shard, std::int64_t i) {
  return expert_of(shard.global({i}));
}
#endif

#if defined(FAIL_compare_local_with_global)
// expect: 'LocalToken' and 'GlobalToken'
bool same(LocalToken a, GlobalToken b) { return a == b; }
#else
bool same(const SequenceShard& shard, LocalToken a, GlobalToken b) { return shard.global(a) == b; }
#endif

#if defined(FAIL_global_token_decoded_as_local)
// expect: a shard knows the way: shard.local(t)
GlobalToken twice(const SequenceShard& shard, LocalToken t) {
  return shard.global(shard.global(t));
}
#else
LocalToken back(const SequenceShard& shard, LocalToken t) { return shard.local(shard.global(t)); }
#endif

}  // namespace moesh
