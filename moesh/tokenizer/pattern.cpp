#include "moesh/tokenizer/pattern.h"

#include <algorithm>
#include <bit>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/formats/name.h"

namespace moesh::tokenizer {
namespace {

using Kind = PatternNode::Type;
using Greed = PatternNode::Greed;
using Opcode = SplitPattern::Opcode;

constexpr std::size_t kMaxInstructions = 20'000;
// How many steps a text may take: far more than any split pattern needs, and linear in its length.
constexpr std::int64_t kStepsPerByte = 1000, kStepsPerInstruction = 4, kMoreSteps = 10'000;
// Repetitions of fewer bytes are scanned again, until a text has taken more steps than are usual.
constexpr std::ptrdiff_t kLongRun = 16;
constexpr std::int64_t kUsualSteps = 1000, kUsualStepsPerByte = 50;

// Instructions of one tree.
class Compiler {
 public:
  Compiler(std::vector<SplitPattern::Instruction>& program, const std::string& what)
      : program_(program), what_(what) {}

  void add(const PatternNode& node) {
    switch (node.kind) {
      case Kind::set:
        return put({.op = Opcode::possessive, .set = bit(node.set), .min = 1, .max = 1});
      case Kind::sequence:
        for (const PatternNode& part : node.parts) add(part);
        return;
      case Kind::alternation: return add_alternation(node);
      case Kind::repeat: return add_repeat(node);
      case Kind::look: return add_look(node);
      case Kind::line_start: return put({.op = Opcode::line_start});
      case Kind::line_end: return put({.op = Opcode::line_end});
    }
  }
  void accept() { put({.op = Opcode::accept}); }

  const std::vector<CodePointSet>& sets() const { return sets_; }

 private:
  std::uint32_t here() const { return static_cast<std::uint32_t>(program_.size()); }
  void put(const SplitPattern::Instruction& instruction) {
    MOESH_CHECK(program_.size() < kMaxInstructions, ErrorKind::data, what_,
                ": the pattern is too long with its repetitions written out");
    program_.push_back(instruction);
  }

  std::uint32_t bit(const CodePointSet& set) {
    auto found = std::find(sets_.begin(), sets_.end(), set);
    if (found == sets_.end()) {
      MOESH_CHECK(sets_.size() < 32, ErrorKind::data, what_,
                  ": the pattern has more than 32 different sets of characters, which moesh does "
                  "not know");
      found = sets_.insert(sets_.end(), set);
    }
    return 1u << (found - sets_.begin());
  }

  void add_alternation(const PatternNode& node) {
    std::vector<std::uint32_t> jumps;
    for (std::size_t i = 0; i < node.parts.size(); ++i) {
      const bool is_last = i + 1 == node.parts.size();
      const std::uint32_t split = here();
      if (!is_last) put({.op = Opcode::split, .to = split + 1});
      add(node.parts[i]);
      if (is_last) break;
      jumps.push_back(here());
      put({.op = Opcode::jump});
      program_[split].other = here();
    }
    for (const std::uint32_t jump : jumps) program_[jump].to = here();
  }

  void add_repeat(const PatternNode& node) {
    const PatternNode& part = node.parts[0];
    if (part.kind == Kind::set && node.greed != Greed::lazy)
      return put({.op = node.greed == Greed::greedy ? Opcode::repeat : Opcode::possessive,
                  .set = bit(part.set),
                  .min = node.min,
                  .max = node.max});
    for (std::uint32_t i = 0; i < node.min; ++i) add(part);
    const bool is_lazy = node.greed == Greed::lazy;
    // Where a part may begin: into it first, or past it first.
    const auto branch = [&](std::uint32_t split, std::uint32_t past) {
      program_[split].to = is_lazy ? past : split + 1;
      program_[split].other = is_lazy ? split + 1 : past;
    };
    if (node.max == PatternNode::kNoLimit) {
      const std::uint32_t split = here();
      put({.op = Opcode::split});
      add(part);
      put({.op = Opcode::jump, .to = split});
      return branch(split, here());
    }
    std::vector<std::uint32_t> splits;
    for (std::uint32_t i = node.min; i < node.max; ++i) {
      splits.push_back(here());
      put({.op = Opcode::split});
      add(part);
    }
    for (const std::uint32_t split : splits) branch(split, here());
  }

  void add_look(const PatternNode& node) {
    const std::uint32_t look = here();
    put({.op = Opcode::look, .negative = node.negative});
    add(node.parts[0]);
    accept();
    program_[look].to = here();
  }

  std::vector<SplitPattern::Instruction>& program_;
  const std::string& what_;
  std::vector<CodePointSet> sets_;
};

const char* previous(const char* at) {
  do --at;
  while (is_continuation(*at));
  return at;
}

}  // namespace

SplitPattern::SplitPattern(std::string_view regex, const std::string& what)
    : what_(what), regex_(regex) {
  const PatternNode root = parse_pattern(regex, what);
  MOESH_CHECK(!root.can_be_empty(), ErrorKind::data, what, ": the pattern '", regex,
              "' may match nothing at all, which moesh does not know");
  const std::vector<PatternNode>& alternatives =
      root.kind == Kind::alternation ? root.parts : std::vector{root};
  Compiler compiler(program_, what_);
  std::vector<CodePointSet> firsts;
  for (const PatternNode& alternative : alternatives) {
    starts_.push_back(static_cast<std::uint32_t>(program_.size()));
    compiler.add(alternative);
    compiler.accept();
    firsts.push_back(alternative.first());
  }
  MOESH_CHECK(firsts.size() <= 32, ErrorKind::data, what, ": the pattern has ", firsts.size(),
              " alternatives; moesh knows up to 32");
  // Nothing is left to fail behind the last repetition: it keeps what it has.
  for (std::size_t i = 0; i + 1 < program_.size(); ++i)
    if (program_[i].op == Opcode::repeat && program_[i + 1].op == Opcode::accept)
      program_[i].op = Opcode::possessive;
  sets_ = CodePointMasks(compiler.sets());
  firsts_ = CodePointMasks(firsts);
}

Matches::Matches(const SplitPattern& pattern, std::string_view text)
    : pattern_(pattern), begin_(text.data()), end_(text.data() + text.size()) {
  const auto num_bytes = static_cast<std::int64_t>(text.size());
  const auto num_instructions = static_cast<std::int64_t>(pattern.program_.size());
  steps_left_ = kMoreSteps + num_bytes * (kStepsPerByte + kStepsPerInstruction * num_instructions);
  unusual_ = steps_left_ - kUsualSteps - num_bytes * kUsualStepsPerByte;
}

std::optional<Match> Matches::next(std::size_t from) {
  for (const char* at = begin_ + from; at < end_;) {
    const char* after = at;
    for (std::uint32_t open = pattern_.firsts_[next_code_point(after)]; open != 0; open &= open - 1)
      if (const char* to = run(pattern_.starts_[std::countr_zero(open)], at))
        return Match{static_cast<std::size_t>(at - begin_), static_cast<std::size_t>(to - begin_)};
    at = after;
  }
  return std::nullopt;
}

// How far the code points of an instruction's set go.
const char* Matches::end_of_run(std::uint32_t pc, const char* at) {
  const char* const from = at;
  LongRun* known = long_runs_.empty() ? nullptr : &long_runs_[pc];
  if (known && at >= known->begin && at <= known->end) return known->end;
  const char* const stop = known && at < known->begin ? known->begin : end_;
  const std::uint32_t set = pattern_.program_[pc].set;
  while (at < stop) {
    const char* next = at;
    if ((pattern_.sets_[next_code_point(next)] & set) == 0) break;
    at = next;
  }
  if (known && at == known->begin) {
    known->begin = from;
    return known->end;
  }
  if (at - from < kLongRun && steps_left_ > unusual_) return at;
  long_runs_.resize(pattern_.program_.size());
  long_runs_[pc] = {.begin = from, .end = at, .failed = at + 1};
  return at;
}

// The end of the match from `at` on, or null.
const char* Matches::run(std::uint32_t pc, const char* at) {
  const std::size_t base = untried_.size();
  for (;;) {
    if (--steps_left_ < 0) {
      untried_.resize(base);
      throw Error(ErrorKind::data,
                  detail::concat(pattern_.what_, ": the pattern ", formats::shown(pattern_.regex_),
                                 " takes too long on a text of ", end_ - begin_,
                                 " bytes; write it with fewer choices"));
    }
    const Instruction& i = pattern_.program_[pc];
    bool works = true;
    switch (i.op) {
      case Opcode::repeat:
      case Opcode::possessive: {
        const auto take = [&](std::uint32_t most) {
          std::uint32_t count = 0;
          for (const char* next = at; count < most && at < end_; ++count, at = next)
            if ((pattern_.sets_[next_code_point(next)] & i.set) == 0) break;
          return count;
        };
        works = take(i.min) == i.min;
        if (!works) break;
        const char* const low = at;
        if (i.max != PatternNode::kNoLimit)
          take(i.max - i.min);
        else
          at = end_of_run(pc, at);
        if (i.op == Opcode::repeat && !long_runs_.empty() && at == long_runs_[pc].end &&
            long_runs_[pc].failed <= at) {
          works = low < long_runs_[pc].failed;
          if (works) at = previous(long_runs_[pc].failed);
        }
        ++pc;
        if (works && i.op == Opcode::repeat && at > low) untried_.push_back({pc, at, low});
        break;
      }
      case Opcode::split:
        untried_.push_back({i.other, at, nullptr});
        pc = i.to;
        break;
      case Opcode::jump: pc = i.to; break;
      case Opcode::look:
        works = (run(pc + 1, at) != nullptr) != i.negative;
        pc = i.to;
        break;
      case Opcode::line_start:
        works = at == begin_ || (at[-1] == '\n' && at < end_);
        ++pc;
        break;
      case Opcode::line_end:
        works = at == end_ || *at == '\n';
        ++pc;
        break;
      case Opcode::accept: untried_.resize(base); return at;
    }
    if (works) continue;
    if (untried_.size() == base) return nullptr;
    Untried& last = untried_.back();
    pc = last.pc;
    if (last.low) {
      if (!long_runs_.empty()) {
        LongRun& known = long_runs_[pc - 1];
        if (last.at >= known.begin && last.at <= known.end)
          known.failed = std::min(known.failed, last.at);
      }
      at = last.at = previous(last.at);
      if (last.at == last.low) untried_.pop_back();
    } else {
      at = last.at;
      untried_.pop_back();
    }
  }
}

}  // namespace moesh::tokenizer
