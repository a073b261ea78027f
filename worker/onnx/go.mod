module github.com/ringbatch/ringbatch/worker/onnx

go 1.26.0

require (
	github.com/ringbatch/ringbatch v0.0.0
	github.com/spf13/pflag v1.0.10
	golang.org/x/sys v0.49.0
)

require (
	github.com/vmihailenco/msgpack/v5 v5.4.1 // indirect
	github.com/vmihailenco/tagparser/v2 v2.0.0 // indirect
	github.com/yalue/onnxruntime_go v1.27.0
)

replace github.com/ringbatch/ringbatch => ../..
