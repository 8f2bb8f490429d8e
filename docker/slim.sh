# Takes out of /opt/espalier what no image of ours uses: tests, pyarrow's headers, and its clients for Flight and S3, which it loads on demand.
set -eu
cd /opt/espalier/lib/python3*/site-packages
find . -type d \( -name tests -o -path ./onnx/backend/test -o -path ./pyarrow/include -o -path ./torch/test \) -prune -exec rm -rf {} +
rm -f pyarrow/*flight*.so* pyarrow/libarrow_s3.so* pyarrow/_s3fs.*.so torch/bin/test_* torch/bin/protoc*
