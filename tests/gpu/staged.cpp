// A process-group backend for tensors on any device. It copies them to the host, calls gloo, and
// copies the results back. Only what the scripts use is implemented.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

namespace {
using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// The copies are queued on the current stream, so nothing is left to wait for.
struct Done final : c10d::Work {
  Tensors tensors;
  c10::intrusive_ptr<c10::ivalue::Future> future;

  explicit Done(Tensors outputs) : tensors(std::move(outputs)) {
    std::vector<c10::Device> devices;
    if (!tensors.empty() && !tensors[0].is_cpu()) devices.push_back(tensors[0].device());
    auto type = c10::ListType::create(c10::TensorType::get());
    future = c10::make_intrusive<c10::ivalue::Future>(type, devices);
    future->markCompleted(c10::IValue(tensors));
    finish();
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  Tensors result() override { return tensors; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
};

WorkPtr done(Tensors outputs) { return c10::make_intrusive<Done>(std::move(outputs)); }

// Waits for the current stream.
at::Tensor to_host(const at::Tensor& x) { return x.detach().to(at::kCPU).contiguous(); }

Tensors to_host(const Tensors& list) {
  Tensors copies;
  for (auto& x : list) copies.push_back(to_host(x));
  return copies;
}

void copy_back(const Tensors& to, const Tensors& from) {
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < to.size(); ++i) to[i].detach().copy_(from[i]);
}

struct Staged final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  c10::intrusive_ptr<Options> options;

  explicit Staged(c10::intrusive_ptr<c10d::Backend> backend)
      : Backend(backend->getRank(), backend->getSize()),
        gloo(std::move(backend)),
        options(c10::make_intrusive<Options>("staged")) {}

  const std::string getBackendName() const override { return "staged"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {}
  WorkPtr endCoalescing() override { return done({}); }

  // gloo has no AVG and sums 16-bit floats in 16 bits. Do both in fp32, which is close to NCCL.
  template <class How, class Reduce>
  WorkPtr reduce_in_fp32(How how, const Tensors& outputs, const Tensors& inputs, Reduce reduce) {
    bool is_mean = how.reduceOp == c10d::ReduceOp::AVG;
    if (is_mean) how.reduceOp = c10d::ReduceOp::SUM;
    Tensors parts, results;
    for (auto& x : to_host(inputs)) {
      bool is_short = x.dtype() == at::kBFloat16 || x.dtype() == at::kHalf;
      parts.push_back(is_short ? x.to(at::kFloat) : x);
    }
    for (auto& x : outputs) results.push_back(at::empty(x.sizes(), parts[0].options()));
    reduce(results, parts, how)->wait();
    if (is_mean) for (auto& x : results) x.div_(getSize());
    copy_back(outputs, results);
    return done(outputs);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& how) override {
    Tensors copies = to_host(tensors);
    gloo->broadcast(copies, how)->wait();
    copy_back(tensors, copies);
    return done(tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& how) override {
    return reduce_in_fp32(how, tensors, tensors, [&](Tensors& results, Tensors& parts, auto& sum) {
      results = parts;
      return gloo->allreduce(results, sum);
    });
  }
  WorkPtr allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& how) override {
    Lists gathered = {to_host(outputs[0])};
    Tensors parts = to_host(inputs);
    gloo->allgather(gathered, parts, how)->wait();
    copy_back(outputs[0], gathered[0]);
    return done(outputs[0]);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& how) override {
    at::Tensor gathered = at::empty(output.sizes(), output.options().device(at::kCPU));
    at::Tensor part = to_host(input);
    gloo->_allgather_base(gathered, part, how)->wait();
    copy_back({output}, {gathered});
    return done({output});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& how) override {
    for (size_t i = 0; i < outputs.size(); ++i) _allgather_base(outputs[i], inputs[i], how);
    return done(outputs);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& how) override {
    auto scatter = [&](Tensors& results, Tensors& parts, auto& sum) {
      return gloo->_reduce_scatter_base(results[0], parts[0], sum);
    };
    return reduce_in_fp32(how, {output}, {input}, scatter);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& how) override {
    for (size_t i = 0; i < outputs.size(); ++i) _reduce_scatter_base(outputs[i], inputs[i], how);
    return done(outputs);
  }
  WorkPtr barrier(const c10d::BarrierOptions& how) override {
    c10d::BarrierOptions on_host = how;
    on_host.device_ids.clear();
    on_host.device.reset();
    gloo->barrier(on_host)->wait();
    return done({});
  }
};
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("staged", [](c10::intrusive_ptr<c10d::Backend> gloo) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Staged>(std::move(gloo)));
  });
}
