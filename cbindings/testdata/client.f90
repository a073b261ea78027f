! SPDX-License-Identifier: Apache-2.0
! A client over ringbatch.f90 of a worker that echoes x:f32[16].
program client
  use ringbatch
  use, intrinsic :: iso_fortran_env, only: int32, real32, real64, int64
  implicit none
  type(ringbatch_client) :: c
  real(real32) :: x(16, 2), y(16, 2), wide(16, 4)
  real(real64) :: double(16, 2)
  integer(int32) :: whole(16, 2)
  character(200) :: socket
  character(8) :: words(3), echoed(3)
  integer :: status, k
  call get_command_argument(1, socket)
  call ringbatch_connect(c, 'nothing', status, socket=socket)
  call want(ringbatch_unknown_model, 'nothing')
  call ringbatch_connect(c, 'echo', status, socket=socket, wait=.true.)
  call want(ringbatch_ok)
  x = reshape([(real(k, real32), k=1, 32)], [16, 2])
  call ringbatch_infer(c, 2, [ringbatch_array(x)], [ringbatch_array(y)], status)
  call want(ringbatch_ok)
  if (any(y /= x)) stop 'another answer'
  call ringbatch_infer(c, 2, [ringbatch_array(double)], [ringbatch_array(y)], status, timeout=60000000000_int64)
  call want(ringbatch_dtype, 'another type')
  call ringbatch_infer(c, 2, [ringbatch_array(x)], [ringbatch_array(whole)], status)
  call want(ringbatch_dtype, 'another type')
  call ringbatch_infer(c, 1, [ringbatch_array(x)], [ringbatch_array(y)], status)
  call want(ringbatch_size, '64 bytes, 128 were given')
  call ringbatch_infer(c, 2, [ringbatch_array(wide(:, 1:4:2))], [ringbatch_array(y)], status)
  call want(ringbatch_invalid, 'contiguous')
  call ringbatch_infer(c, 2, [ringbatch_array(x), ringbatch_array(x)], [ringbatch_array(y)], status)
  call want(ringbatch_invalid)
  call ringbatch_infer(c, 2, [ringbatch_array(x)], [ringbatch_array(y), ringbatch_array(y)], status)
  call want(ringbatch_invalid)
  call ringbatch_close(c)
  call ringbatch_connect(c, 'words', status, socket=socket, wait=.true., window=3, patience=60000000000_int64)
  call want(ringbatch_ok)
  words = [character(8) :: 'one', '', 'a b sé']
  call ringbatch_infer(c, 3, [ringbatch_array(ringbatch_text(words))], [ringbatch_array(echoed)], status)
  call want(ringbatch_ok)
  if (any(ringbatch_blanks(echoed) /= words) .or. any(echoed == words)) stop 'other words'
  call ringbatch_infer(c, 4, [ringbatch_array(words)], [ringbatch_array(echoed)], status)
  call want(ringbatch_size)
  call ringbatch_infer(c, 2, [ringbatch_array(x)], [ringbatch_array(echoed)], status)
  call want(ringbatch_dtype)
  call ringbatch_close(c)
  print '(a)', 'ok'
contains
  subroutine want(expected, text)
    integer, intent(in) :: expected
    character(*), intent(in), optional :: text
    logical :: good
    good = status == expected
    if (good .and. present(text)) good = index(ringbatch_error(), text) > 0
    if (good) return
    print *, status, 'expected', expected, ringbatch_error()
    stop 1
  end subroutine
end program
