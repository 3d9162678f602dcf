#include "moesh/kernels/table.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <thread>

#include "moesh/base/error.h"
#include "moesh/kernels/gpu_kernels.h"
#include "tests/kernels/support.h"

namespace moesh::kernels {
namespace {

const at::Device kElsewhere("xpu:0");  // a device type without a row

template <class F>
std::string message_of(const F& f) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::config);
    return e.what();
  }
  return "nothing was thrown";
}

// Every member is a pointer.
auto entries(const KernelTable& t) {
  std::array<std::uintptr_t, sizeof(t) / sizeof(std::uintptr_t)> all;
  static_assert(sizeof(all) == sizeof(t));
  std::memcpy(all.data(), &t, sizeof(t));
  return all;
}

TEST(KernelTable, HasEveryEntryOnEveryDevice) {
  // Null: what another kernel takes, or a device refuses; attention.
  EXPECT_EQ(std::ranges::count(entries(aten_kernels()), 0U), 8);
  const auto wanted = entries(aten_kernels());
  for (const KernelTable* t :
       {&cpu_kernels(), &meta_kernels(), &ampere_kernels(), &hopper_kernels()}) {
    const auto all = entries(*t);
    for (std::size_t i = 0; i < all.size(); ++i)
      EXPECT_TRUE(all[i] || !wanted[i]) << "entry " << i << " of " << t->name;
    EXPECT_EQ(t->attention_forward == nullptr, t->attention_backward == nullptr) << t->name;
  }
}

TEST(KernelTable, IsChosenByTheDevice) {
  for (auto choice : {GpuKernels::automatic, GpuKernels::own, GpuKernels::library}) {
    const UseGpuKernels chosen(choice);  // says nothing about these two
    EXPECT_EQ(&kernels_for(at::kCPU), &cpu_kernels()) << to_string(choice);
    EXPECT_EQ(&kernels_for(at::kMeta), &meta_kernels()) << to_string(choice);
  }
  EXPECT_EQ(&kernels_for(kElsewhere), &aten_kernels());
  const UseGpuKernels chosen(GpuKernels::own);
  EXPECT_EQ(message_of([] { kernels_for(kElsewhere); }),
            "kernels.gpu is own, but moesh has no kernels for xpu:0; use auto or library");
}

// Own kernels that want bfloat16 on the CPU.
KernelTable picky() {
  KernelTable t = aten_kernels();
  t.refuses_device = [](at::Device device) -> std::string {
    return device.is_cpu() ? "" : detail::concat(device, " has compute capability 8.0");
  };
  t.refuses_experts = [](const ExpertsConfig&, const ExpertsWeights& w) -> std::string {
    return w.w1_eFD.scalar_type() == at::kBFloat16 ? "" : "the weights are not bfloat16";
  };
  return t;
}

TEST(KernelTable, TheFirstThatTakesTheDeviceIsTaken) {
  KernelTable new_chip = picky(), old_chip = picky();
  new_chip.refuses_device = [](at::Device) -> std::string { return "it is not new"; };
  const KernelTable* both[] = {&new_chip, &old_chip};
  for (auto choice : {GpuKernels::automatic, GpuKernels::own}) {
    const UseGpuKernels chosen(choice);
    EXPECT_EQ(&first_that_takes(both, at::kCPU), &old_chip);
  }
  new_chip.refuses_device = nullptr;
  EXPECT_EQ(&first_that_takes(both, at::kCPU), &new_chip);
  EXPECT_EQ(&first_that_takes(both, kElsewhere), &new_chip);
}

// A GPU that is not Hopper has the kernels for rows, loss and update, and no experts of its own.
TEST(KernelTable, HopperHasAllThatAmpereHas) {
  const KernelTable &aten = aten_kernels(), &ampere = ampere_kernels(), &hopper = hopper_kernels();
  EXPECT_NE(ampere.norm_forward, aten.norm_forward);
  EXPECT_NE(ampere.top_k, aten.top_k);
  EXPECT_NE(ampere.adamw_, aten.adamw_);
  EXPECT_EQ(ampere.experts_forward, aten.experts_forward);
  EXPECT_EQ(ampere.gate_forward, aten.gate_forward);
  EXPECT_EQ(hopper.norm_forward, ampere.norm_forward);
  EXPECT_EQ(hopper.adamw_, ampere.adamw_);
  EXPECT_NE(hopper.experts_forward, ampere.experts_forward);
  EXPECT_NE(hopper.gate_forward, ampere.gate_forward);
  EXPECT_FALSE(ampere.refuses_experts({}, {}).empty());
}

TEST(KernelTable, WhatIsRefusedGoesToTheLibraryUnlessOwnIsAskedFor) {
  const KernelTable own = picky();
  const KernelTable* only[] = {&own};
  const auto of_device = [&](at::Device device) { return &first_that_takes(only, device); };
  const auto of_experts = [&](const ExpertsWeights& w) {
    return &for_experts(*of_device(at::kCPU), {}, w);
  };
  const at::Tensor wide = at::zeros({1, 2, 2}), narrow = wide.to(at::kBFloat16);
  const ExpertsWeights taken{narrow, narrow, narrow}, refused{wide, wide, wide};
  EXPECT_EQ(of_device(at::kCPU), &own);
  EXPECT_EQ(of_experts(taken), &own);
  EXPECT_EQ(of_device(kElsewhere), &aten_kernels());
  EXPECT_EQ(of_experts(refused), &aten_kernels());
  {
    const UseGpuKernels chosen(GpuKernels::library);
    EXPECT_EQ(of_device(at::kCPU), &aten_kernels());
    EXPECT_EQ(of_experts(taken), &aten_kernels());
  }
  const UseGpuKernels chosen(GpuKernels::own);
  EXPECT_EQ(of_experts(taken), &own);
  EXPECT_EQ(message_of([&] { of_device(kElsewhere); }),
            "kernels.gpu is own, but xpu:0 has compute capability 8.0; use auto or library");
  EXPECT_EQ(message_of([&] { of_experts(refused); }),
            "kernels.gpu is own, but the weights are not bfloat16; use auto or library");
}

TEST(KernelTable, AChoiceIsThatOfItsThreadAndEnds) {
  const UseGpuKernels outer(GpuKernels::library);
  {
    const UseGpuKernels inner(GpuKernels::own);
    EXPECT_EQ(gpu_kernels(), GpuKernels::own);
    std::thread([] { EXPECT_EQ(gpu_kernels(), GpuKernels::automatic); }).join();
  }
  EXPECT_EQ(gpu_kernels(), GpuKernels::library);
}

// Where this program has kernels for CUDA they may also take the device of this machine.
TEST(KernelTable, OwnKernelsForCudaRunOrSayWhyNot) {
  const at::Device cuda("cuda:0");
  const std::string reason = ampere_kernels().refuses_device(cuda);
  const UseGpuKernels chosen(GpuKernels::own);
  EXPECT_EQ(message_of([&] { kernels_for(cuda); }),
            reason.empty() ? "nothing was thrown"
                           : "kernels.gpu is own, but " + reason + "; use auto or library");
}

TEST(KernelTable, ExpertsAreChosenWithTheirWeights) {
  const at::Tensor w = at::zeros({1, 2, 2});
  EXPECT_EQ(&kernels_for({}, {w, w, w}), &cpu_kernels());
  const at::Tensor m = w.to(at::kMeta);
  EXPECT_EQ(&kernels_for({}, {m, m, m}), &meta_kernels());
  // LoRA on experts is LibTorch's where the own kernels do not take it.
  const at::Tensor b = at::zeros({1, 8, 8}, at::kBFloat16);
  EXPECT_EQ(hopper_kernels().refuses_experts({}, {b, b, b, {}, {}, {}, {b, b}}), "");
  for (const at::Tensor& t : {w, m})
    EXPECT_EQ(&kernels_for({}, {t, t, t, {}, {}, {}, {t, t}}), &aten_kernels());
}

}  // namespace
}  // namespace moesh::kernels
