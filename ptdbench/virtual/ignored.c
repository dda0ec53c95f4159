/* Calls that succeed and do nothing, each with the reason why that is correct for a device without memory contents and
 * kernels. */

/* Arguments are not read, so signatures do not matter; NVIDIA's headers are not included, as they would conflict. */
#define IGNORED(name) \
    __attribute__((visibility("default"))) int name(void) { return 0; }

/* Settings of descriptors that are never read. */
IGNORED(cublasLtMatmulPreferenceSetAttribute)
IGNORED(cudnnSetActivationDescriptor)
IGNORED(cudnnSetConvolutionGroupCount)
IGNORED(cudnnSetConvolutionMathType)
IGNORED(cudnnSetConvolutionNdDescriptor)
IGNORED(cudnnSetFilterNdDescriptor)
IGNORED(cudnnSetTensorNdDescriptor)
IGNORED(cudnnSetDropoutDescriptor)
IGNORED(cudnnRestoreDropoutDescriptor)

/* Destruction of descriptors that are all the same object (cudnn.c, products.c). */
IGNORED(cublasLtMatmulPreferenceDestroy)
IGNORED(cudnnDestroyActivationDescriptor)
IGNORED(cudnnDestroyConvolutionDescriptor)
IGNORED(cudnnDestroyDropoutDescriptor)
IGNORED(cudnnDestroyFilterDescriptor)
IGNORED(cudnnDestroyTensorDescriptor)

/* The caller owns the workspace; the number of multiprocessors for a product only changes its duration. */
IGNORED(cublasSetWorkspace_v2)
IGNORED(cublasSetSmCountTarget)

/* Limits and preferences of a kernel or device: maxima of a device are checked at launch, and earlier by Triton. */
IGNORED(cudaFuncSetAttribute)
IGNORED(cudaKernelSetAttributeForDevice)
IGNORED(cuFuncSetAttribute)
IGNORED(cuFuncSetCacheConfig)
IGNORED(cuCtxSetLimit)

/* Every device can access the memory of every other. */
IGNORED(cudaDeviceEnablePeerAccess)
IGNORED(cuMemSetAccess)

/* Start and stop of NVIDIA's profilers; the driver's error logs; modules, which hold no code here. */
IGNORED(cudaProfilerStart)
IGNORED(cudaProfilerStop)
IGNORED(cuLogsRegisterCallback)
IGNORED(cuLogsUnregisterCallback)
IGNORED(cuModuleUnload)

/* torch's profiler sets callbacks for calls and attributes of buffers, which records do not need. */
IGNORED(cuptiActivityEnableCudaEventDeviceTimestamps)
IGNORED(cuptiActivityEnableDriverApi)
IGNORED(cuptiActivityEnableRuntimeApi)
IGNORED(cuptiActivitySetAttribute)
IGNORED(cuptiEnableCallback)
IGNORED(cuptiEnableDomain)
IGNORED(cuptiFinalize)
IGNORED(cuptiSubscribe)
IGNORED(cuptiUnsubscribe)

/* Registering buffers only makes messages faster. */
IGNORED(ncclCommRegister)
IGNORED(ncclCommDeregister)
IGNORED(ncclCommWindowRegister)
IGNORED(ncclCommWindowDeregister)
