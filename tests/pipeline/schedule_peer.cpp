// Prints a schedule for each line "name ranks stages-of-a-rank micro-batches": a line for each
// rank. Two actions that are joined are one word, as in "F0.4+B3.1".

#include <iostream>

#include "moesh/pipeline/schedule.h"

int main() {
  std::string name;
  int p = 0, v = 0, m = 0;
  while (std::cin >> name >> p >> v >> m)
    for (const auto& list :
         moesh::pipeline::make_schedule(name, p, v, m, name == "dualpipev").ranks) {
      for (const auto& a : list) std::cout << to_string(a) << (a.joins_next ? '+' : ' ');
      std::cout << '\n';
    }
}
