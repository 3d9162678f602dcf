#include "moesh/pipeline/simulate.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "moesh/base/error.h"
#include "moesh/base/text.h"

namespace moesh::pipeline {
namespace {

// Stages of a rank from the first: 0, 1, ...
int round_of(const std::vector<Timed>& list, const Action& action) {
  std::set<int> before;
  for (const Timed& t : list)
    if (t.action.stage < action.stage) before.insert(t.action.stage);
  return static_cast<int>(before.size());
}

bool has_several_stages(const Simulation& s) {
  return std::any_of(s.ranks.begin(), s.ranks.end(), [](const auto& list) {
    return std::any_of(list.begin(), list.end(),
                       [&](const Timed& t) { return t.action.stage != list[0].action.stage; });
  });
}

std::string label(const Action& action, bool with_stage) {
  const std::string full = to_string(action);
  return with_stage ? full : full.substr(0, 1) + std::to_string(action.micro_batch);
}
// Two that are joined count as one.
std::string label(const std::vector<Timed>& list, size_t i, bool with_stage) {
  const std::string first = label(list[i].action, with_stage);
  return list[i].action.joins_next ? first + "&" + label(list[i + 1].action, with_stage) : first;
}
bool is_second(const std::vector<Timed>& list, size_t i) {
  return i > 0 && list[i - 1].action.joins_next;
}

// So many that the label of each action fits into it, with a space.
int enough_columns(const Simulation& s, bool with_stage) {
  double most = 0;
  for (const auto& list : s.ranks)
    for (size_t i = 0; i < list.size(); ++i)
      if (const Timed& t = list[i]; t.end > t.start && !is_second(list, i))
        most = std::max(
            most, static_cast<double>(label(list, i, with_stage).size() + 1) / (t.end - t.start));
  return static_cast<int>(std::ceil(most * s.time));
}

constexpr const char* kColours[] = {"#4c78a8", "#59a14f", "#7cb86f", "#f2a541"};
constexpr const char* kNames[] = {"forward", "backward", "backward of inputs",
                                  "backward of weights"};
constexpr double kLeft = 60, kWidth = 900, kRow = 26, kTop = 52;

std::string rectangle(double x, double y, double width, double height, const char* colour,
                      double opacity) {
  return formatted(
      "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" fill=\"%s\" "
      "fill-opacity=\"%.2f\"/>\n",
      x, y, width, height, colour, opacity);
}

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text)
    out += c == '&' ? "&amp;" : c == '<' ? "&lt;" : c == '>' ? "&gt;" : std::string(1, c);
  return out;
}

std::string text_at(double x, double y, const std::string& text, const char* more) {
  return formatted("<text x=\"%.2f\" y=\"%.2f\" %s>", x, y, more) + escaped(text) + "</text>\n";
}

std::string draw_action(const Timed& t, int round, double y, double height, double scale) {
  const int kind = static_cast<int>(t.action.kind);
  // Later stages of a rank are paler.
  const double opacity = std::max(0.35, 1 - 0.4 * round), width = (t.end - t.start) * scale;
  const double x = kLeft + t.start * scale, gap = std::min(1.0, width / 10);
  std::string out = rectangle(x, y + 1, width - gap, height - 2, kColours[kind], opacity);
  const std::string number = std::to_string(t.action.micro_batch);
  if (width >= 7.0 * static_cast<double>(number.size()))
    out += text_at(x + width / 2, y + height / 2 + 4, number,
                   round == 0 ? "text-anchor=\"middle\" fill=\"#ffffff\""
                              : "text-anchor=\"middle\" fill=\"#202020\"");
  return out;
}

}  // namespace

std::string draw_text(const Simulation& s, int columns) {
  const bool with_stage = has_several_stages(s);
  const int width = columns > 0 ? columns : enough_columns(s, with_stage);
  const double scale = s.time > 0 ? width / s.time : 0;
  std::string out;
  for (size_t r = 0; r < s.ranks.size(); ++r) {
    std::string line(static_cast<size_t>(width), '.');
    for (size_t i = 0; i < s.ranks[r].size(); ++i) {
      if (is_second(s.ranks[r], i)) continue;
      const Timed& t = s.ranks[r][i];
      const auto begin = static_cast<size_t>(std::lround(t.start * scale)),
                 end = static_cast<size_t>(std::lround(t.end * scale));
      std::string text = label(s.ranks[r], i, with_stage);
      if (text.size() < end - begin)
        text.resize(end - begin, ' ');
      else
        text.assign(end - begin, text[0]);
      line.replace(begin, end - begin, text);
    }
    out += formatted("rank %-3zu ", r) + line + "\n";
  }
  return out;
}

std::string draw_svg(const Simulation& s, const std::string& title, const std::string& note) {
  const double scale = s.time > 0 ? kWidth / s.time : 0,
               bottom = kTop + kRow * static_cast<double>(s.ranks.size()), height = bottom + 34;
  std::string out = formatted(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" "
      "height=\"%.0f\" font-family=\"sans-serif\" font-size=\"11\">\n",
      kLeft + kWidth + 12, height, kLeft + kWidth + 12, height);
  out += "<title>" + escaped(title) + "</title>\n";
  out += rectangle(0, 0, kLeft + kWidth + 12, height, "#ffffff", 1);
  out += text_at(kLeft, 22, title, "font-size=\"15\" fill=\"#202020\"");
  const std::string numbers =
      formatted("bubble %.1f %%, at most %g activations on a rank", 100 * s.bubble_fraction(),
                *std::max_element(s.peak.begin(), s.peak.end()));
  out += text_at(kLeft, 40, note.empty() ? numbers : note, "fill=\"#606060\"");
  std::set<int> kinds;
  bool has_rounds = false;
  for (size_t r = 0; r < s.ranks.size(); ++r) {
    const double y = kTop + kRow * static_cast<double>(r);
    out += text_at(8, y + kRow / 2 + 4, detail::concat("rank ", r), "fill=\"#202020\"");
    out += rectangle(kLeft, y + 1, kWidth, kRow - 2, "#d8d8d8", 0.5);
    for (size_t i = 0; i < s.ranks[r].size(); ++i) {
      const Timed& t = s.ranks[r][i];
      const int round = round_of(s.ranks[r], t.action);
      has_rounds |= round > 0;
      kinds.insert(static_cast<int>(t.action.kind));
      // Two that are joined share the row, the forward above.
      const bool is_lower = is_second(s.ranks[r], i), is_half = is_lower || t.action.joins_next;
      out += draw_action(t, round, is_lower ? y + kRow / 2 : y, is_half ? kRow / 2 : kRow, scale);
    }
  }
  double x = kLeft;
  const auto explain = [&](const char* colour, double opacity, const std::string& name) {
    out += rectangle(x, bottom + 10, 12, 12, colour, opacity);
    out += text_at(x + 18, bottom + 20, name, "fill=\"#202020\"");
    x += 40 + 6.2 * static_cast<double>(name.size());
  };
  for (const int kind : kinds) explain(kColours[kind], 1, kNames[kind]);
  explain("#d8d8d8", 0.5, "waiting");
  out += text_at(x, bottom + 20,
                 has_rounds ? "numbers: micro-batches; paler: a later stage of the rank"
                            : "numbers: micro-batches",
                 "fill=\"#606060\"");
  return out + "</svg>\n";
}

}  // namespace moesh::pipeline
