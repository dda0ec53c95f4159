/* Calls that succeed and do nothing, each with the reason why that is the truth of a device without memory contents and
 * without kernels. */

/* Arguments are not looked at, so signatures do not matter, and NVIDIA's headers would object. */
#define IGNORED(name) \
    __attribute__((visibility("default"))) int name(void) { return 0; }

/* Settings of descriptors of which nothing is read afterwards: the products' sizes come with the product. */
IGNORED(cublasLtMatmulPreferenceSetAttribute)
IGNORED(cudnnSetActivationDescriptor)
IGNORED(cudnnSetConvolutionGroupCount)
IGNORED(cudnnSetConvolutionMathType)
IGNORED(cudnnSetConvolutionNdDescriptor)
IGNORED(cudnnSetFilterNdDescriptor)
IGNORED(cudnnSetTensorNdDescriptor)
IGNORED(cudnnSetDropoutDescriptor)
IGNORED(cudnnRestoreDropoutDescriptor)

/* Ends of descriptors that are all one (cudnn.c, products.c). */
IGNORED(cublasLtMatmulPreferenceDestroy)
IGNORED(cudnnDestroyActivationDescriptor)
IGNORED(cudnnDestroyConvolutionDescriptor)
IGNORED(cudnnDestroyDropoutDescriptor)
IGNORED(cudnnDestroyFilterDescriptor)
IGNORED(cudnnDestroyTensorDescriptor)

/* The caller keeps the workspace; how many processors a product may take only changes its time. */
IGNORED(cublasSetWorkspace_v2)
IGNORED(cublasSetSmCountTarget)

/* Limits and preferences of a kernel or device: the greatest that a device has are checked at the launch, by Triton
 * itself before. */
IGNORED(cudaFuncSetAttribute)
IGNORED(cudaKernelSetAttributeForDevice)
IGNORED(cuFuncSetAttribute)
IGNORED(cuFuncSetCacheConfig)
IGNORED(cuCtxSetLimit)

/* Any device reaches the memory of any other. */
IGNORED(cudaDeviceEnablePeerAccess)
IGNORED(cuMemSetAccess)

/* Where a profiler of NVIDIA's starts and stops; what the driver would say of errors; modules hold no code here. */
IGNORED(cudaProfilerStart)
IGNORED(cudaProfilerStop)
IGNORED(cuLogsRegisterCallback)
IGNORED(cuLogsUnregisterCallback)
IGNORED(cuModuleUnload)

/* torch's profiler asks for callbacks of calls and for attributes of buffers; records come without. */
IGNORED(cuptiActivityEnableCudaEventDeviceTimestamps)
IGNORED(cuptiActivityEnableDriverApi)
IGNORED(cuptiActivityEnableRuntimeApi)
IGNORED(cuptiActivitySetAttribute)
IGNORED(cuptiEnableCallback)
IGNORED(cuptiEnableDomain)
IGNORED(cuptiFinalize)
IGNORED(cuptiSubscribe)
IGNORED(cuptiUnsubscribe)

/* Registered buffers make messages faster. */
IGNORED(ncclCommRegister)
IGNORED(ncclCommDeregister)
IGNORED(ncclCommWindowRegister)
IGNORED(ncclCommWindowDeregister)
