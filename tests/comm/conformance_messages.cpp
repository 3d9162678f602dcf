// Messages between two ranks: every backend, with and without `checked`.

#include <chrono>
#include <thread>

#include "conformance_values.h"
#include "moesh/comm/observers.h"
#include "tests/comm/trace.h"

namespace moesh::comm::conformance {
namespace {

int next(const Group& g, int step = 1) { return (g.rank() + step) % g.size(); }
int previous(const Group& g, int step = 1) { return (g.rank() + g.size() - step) % g.size(); }

// Every rank to every other one.
void open_all(Group& g) {
  std::vector<Channel> channels;
  for (int i = 0; i < g.size(); ++i)
    for (int j = 0; j < g.size(); ++j)
      if (i != j) channels.push_back({i, j});
  g.open_channels(channels);
}

at::TensorOptions options_of(at::ScalarType dtype, const Setup& s) {
  return at::TensorOptions(dtype).device(s.device);
}

// Round the group. Ranks have other sizes, also none; all send first.
void messages_of_every_dtype(Group& g, const Setup& s) {
  open_all(g);
  if (g.size() == 1) return;
  int salt = 0;
  for (const auto dtype : kDtypes)
    for (const Shape& shape :
         {Shape{}, Shape{1}, Shape{5}, Shape{0}, Shape{0, 3}, Shape{2, 3, 5}, Shape{20'011}}) {
      ++salt;
      const auto sizes = [&](int r) {
        Shape own = shape;
        if (!own.empty() && own[0] > 1) own[0] += r;
        return own;
      };
      const int from = previous(g);
      Handle send =
          g.start_send(host(dtype, sizes(g.rank()), g.rank(), salt).to(s.device), next(g));
      Handle recv = g.start_recv(sizes(from), options_of(dtype, s), from);
      const at::Tensor y = recv.wait();
      send.wait();
      require(y.device() == s.device, "what came is on ", y.device());
      expect_equal(y, host(dtype, sizes(from), from, salt),
                   detail::concat("a message of ", dtype, " ", sizes(from)));
      require(same_bits(recv.wait(), y), "a second wait gives another value");
    }
}

// All send to all before anyone receives, and wait for what they sent before what they get.
void messages_cross_each_other(Group& g, const Setup& s) {
  open_all(g);
  for (const std::int64_t numel : {std::int64_t{3}, std::int64_t{300'007}}) {
    std::vector<Handle> sends, recvs;
    for (int k = 1; k < g.size(); ++k)
      sends.push_back(
          g.start_send(host(at::kFloat, {numel}, g.rank(), next(g, k)).to(s.device), next(g, k)));
    for (int k = 1; k < g.size(); ++k)
      recvs.push_back(g.start_recv({numel}, options_of(at::kFloat, s), previous(g, k)));
    for (auto& send : sends) send.wait();
    for (int k = 1; k < g.size(); ++k)
      expect_equal(recvs[static_cast<size_t>(k - 1)].wait(),
                   host(at::kFloat, {numel}, previous(g, k), g.rank()), "a message that crossed");
  }
}

// Many in progress, large and small: each receive gets its own, whenever it is waited for.
void messages_keep_their_order(Group& g, const Setup& s) {
  open_all(g);
  if (g.size() == 1) return;
  const auto sizes = [](int i) { return Shape{i % 3 == 0 ? 9001 + i : i % 7, 2}; };
  const int num = 40;
  for (const bool receives_first : {false, true}) {
    std::vector<Handle> sends, recvs;
    const auto send = [&] {
      for (int i = 0; i < num; ++i)
        sends.push_back(g.start_send(
            host(i % 2 ? at::kBFloat16 : at::kLong, sizes(i), g.rank(), i).to(s.device), next(g),
            100 + i));
    };
    const auto receive = [&] {
      for (int i = 0; i < num; ++i)
        recvs.push_back(g.start_recv(sizes(i), options_of(i % 2 ? at::kBFloat16 : at::kLong, s),
                                     previous(g), 100 + i));
    };
    if (receives_first == (g.rank() % 2 == 0)) receive();
    send();
    if (receives_first != (g.rank() % 2 == 0)) receive();
    for (int i = num - 1; i >= 0; --i)
      expect_equal(recvs[static_cast<size_t>(i)].wait(),
                   host(i % 2 ? at::kBFloat16 : at::kLong, sizes(i), previous(g), i),
                   detail::concat("message ", i));
    for (auto& h : sends) h.wait();
  }
}

// A receive that was started early holds up no collective, and no message of another channel.
void messages_wait_for_nobody_else(Group& g, const Setup& s) {
  open_all(g);
  if (g.size() == 1) return;
  const auto twin = g.split(0, g.rank(), "twin");
  open_all(*twin);
  for (int round = 0; round < 5; ++round) {
    Handle late = g.start_recv({20'011}, options_of(at::kFloat, s), previous(g));
    Handle other = twin->start_recv({5}, options_of(at::kDouble, s), previous(g));
    const at::Tensor sum = g.all_reduce(at::ones({3}, options_of(at::kLong, s)));
    require(sum[0].item<std::int64_t>() == g.size(), "the collective between");
    Handle sent = twin->start_send(host(at::kDouble, {5}, g.rank(), round).to(s.device), next(g));
    expect_equal(other.wait(), host(at::kDouble, {5}, previous(g), round),
                 "a message of another group");
    twin->barrier();
    Handle last = g.start_send(host(at::kFloat, {20'011}, g.rank(), round).to(s.device), next(g));
    expect_equal(late.wait(), host(at::kFloat, {20'011}, previous(g), round),
                 "a message that was awaited for long");
    sent.wait();
    last.wait();
  }
}

// What was sent is kept, and is the caller's again afterwards, also if the receiver is slow.
void messages_are_kept_until_received(Group& g, const Setup& s) {
  open_all(g);
  if (g.size() == 1) return;
  for (const std::int64_t numel : {5, 40'009, 300'007})
    for (int round = 0; round < 4; ++round) {
      at::Tensor x = at::full({numel}, 100 * round + g.rank(), options_of(at::kLong, s));
      Handle send = g.start_send(x, next(g));
      Handle dropped = g.start_send(x + 1, next(g));  // nobody else holds that sum
      if (g.rank() == round % g.size()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      Handle recv = g.start_recv({numel}, options_of(at::kLong, s), previous(g));
      Handle second = g.start_recv({numel}, options_of(at::kLong, s), previous(g));
      send.wait();
      x.fill_(-1);
      const int expected = 100 * round + previous(g);
      require(recv.wait().eq(expected).all().item<bool>(), "a message has a later value");
      require(second.wait().eq(expected + 1).all().item<bool>(), "a message was not kept");
      dropped.wait();
    }
}

void messages_need_not_be_contiguous(Group& g, const Setup& s) {
  open_all(g);
  if (g.size() == 1) return;
  const auto view = [](const at::Tensor& x) { return x.transpose(0, 2).slice(0, 1, 8, 2); };
  const at::Tensor x = view(host(at::kFloat, {8, 6, 10}, g.rank(), 3).to(s.device));
  Handle send = g.start_send(x, next(g));
  const at::Tensor expected = view(host(at::kFloat, {8, 6, 10}, previous(g), 3)).contiguous();
  expect_equal(g.start_recv(expected.sizes(), options_of(at::kFloat, s), previous(g)).wait(),
               expected, "a message of a view");
  send.wait();
}

void messages_are_traced(Group& g, const Setup& s) {
  open_all(g);
  if (g.size() == 1) return;
  Trace trace;
  SentBytes bytes;
  Handle send = g.start_send(at::ones({3, 2}, options_of(at::kFloat, s)), next(g));
  g.start_recv({3, 2}, options_of(at::kFloat, s), previous(g)).wait();
  send.wait();
  const auto& seen = trace.entries();
  require(seen.size() == 2, "the trace has ", seen.size(), " entries");
  require(seen[0].op == Collective::send && seen[1].op == Collective::recv, "the trace has ",
          to_string(seen[0].op), " and ", to_string(seen[1].op));
  for (const auto& e : seen)
    require(e.group == g.name() && e.bytes == 24, "an entry of '", e.group, "' with ", e.bytes,
            " bytes");
  const auto sent = bytes.take();
  require(sent.size() == 1 && sent.at(g.name()) == 24, "other bytes are counted as sent");
}

void bad_messages_are_refused(Group& g, const Setup& s) {
  const auto x = at::ones({3}, options_of(at::kFloat, s));
  const auto name = "on group '" + g.name() + "'";
  const int me = g.rank();
  expect_error(
      [&] { g.start_send(x, me).wait(); },
      {"send", name, detail::concat("rank ", me, " would send to itself; keep the tensor")});
  expect_error([&] { g.start_recv({3}, x.options(), me).wait(); }, {"recv", name, "to itself"});
  expect_error([&] { g.open_channels({{me, me}}); }, {name, "would send to itself"});
  expect_error([&] { g.start_send(x, g.size()).wait(); },
               {"send", name, detail::concat("to rank ", g.size()), "the group has ranks 0 to"});
  expect_error([&] { g.start_recv({3}, x.options(), -1).wait(); }, {"recv", name, "from rank -1"});
  if (g.size() == 1) return;
  expect_error([&] { g.start_send(x, next(g)).wait(); },
               {"send", name,
                detail::concat("the channel from rank ", me, " to rank ", next(g), " is not open"),
                "every rank calls open_channels"});
  open_all(g);
  open_all(g);  // again: nothing
  expect_error([&] { g.start_send(at::Tensor(), next(g)).wait(); }, {"send", name, "undefined"});
  expect_error([&] { g.start_send(x.to(at::kHalf), next(g)).wait(); },
               {"send", name, "dtype float16 is not supported"});
  expect_error([&] { g.start_recv({3}, x.options().dtype(at::kHalf), next(g)).wait(); },
               {"recv", name, "dtype float16 is not supported"});
  expect_error([&] { g.start_recv({3, -1}, x.options(), next(g)).wait(); },
               {"recv", name, "have a negative entry"});
  expect_error([&] { g.start_recv({1, 1, 1, 1, 1, 1, 1, 1, 1}, x.options(), next(g)).wait(); },
               {"9 dimensions; at most 8"});
  Handle send = g.start_send(x, next(g));  // none of these was counted as a message
  expect_equal(g.start_recv({3}, x.options(), previous(g)).wait(), x, "the first message");
  send.wait();
}

}  // namespace

const std::vector<Case>& message_cases() {
  static const std::vector<Case> all{
      {"messages_of_every_dtype", messages_of_every_dtype},
      {"messages_cross_each_other", messages_cross_each_other},
      {"messages_keep_their_order", messages_keep_their_order},
      {"messages_wait_for_nobody_else", messages_wait_for_nobody_else},
      {"messages_are_kept_until_received", messages_are_kept_until_received},
      {"messages_need_not_be_contiguous", messages_need_not_be_contiguous},
      {"messages_are_traced", messages_are_traced},
      {"bad_messages_are_refused", bad_messages_are_refused},
  };
  return all;
}

}  // namespace moesh::comm::conformance
