! SPDX-License-Identifier: Apache-2.0
! ringbatch.f90: a client in Fortran 2018, over ringbatch.h, whose rules hold here, too. Compile it with your program.
!
!   type(ringbatch_client) :: c
!   real(real32) :: x(4, 8), y(2, 8)             ! 8 rows of x:f32[4] -> y:f32[2]
!   call ringbatch_connect(c, 'net', status)
!   call ringbatch_infer(c, 8, [ringbatch_array(x)], [ringbatch_array(y)], status)
!   if (status /= ringbatch_ok) print *, ringbatch_error()
!
! The last dimension of an array is the rows; the others are the tensor's in reverse, as Fortran stores them. Arrays are
! targets, and contiguous. Their element type and bytes are compared with the model's. A text:str[<=40] is a character(40):
!
!   texts = ringbatch_text(texts)                ! ends each text before its trailing blanks; ringbatch_blanks is the inverse
module ringbatch
  use, intrinsic :: iso_c_binding
  use, intrinsic :: iso_fortran_env, only: int8, int32, int64, real32, real64
  implicit none
  private
  public :: ringbatch_client, ringbatch_array, ringbatch_connect, ringbatch_infer, ringbatch_close, ringbatch_error
  public :: ringbatch_text, ringbatch_blanks

  integer, parameter, public :: ringbatch_ok = 0, ringbatch_failed = 1, ringbatch_unknown_model = 12, ringbatch_invalid = 21, &
    ringbatch_dtype = 22, ringbatch_size = 25, ringbatch_timeout = 34

  type :: ringbatch_client
    private
    integer(c_int64_t) :: id = 0
  end type

  !> The memory of one tensor: made by ringbatch_array(x).
  type :: array
    type(c_ptr) :: at = c_null_ptr
    integer(c_int64_t) :: bytes = 0
    integer(c_int32_t) :: dtype = 0
  end type

  interface ringbatch_array
    procedure :: of_int8, of_int32, of_int64, of_real32, of_real64, of_text
  end interface

  type, bind(c) :: connect_options
    integer(c_int32_t) :: size = 0, window = 0
    type(c_ptr) :: socket = c_null_ptr, name = c_null_ptr
    integer(c_int64_t) :: patience = 0
    integer(c_int32_t) :: wait = 0, device = 0
  end type

  type, bind(c) :: tensor
    character(kind=c_char) :: name(129)
    integer(c_int8_t) :: on_device
    integer(c_int32_t) :: dtype, rank, variable
    integer(c_int64_t) :: shape(8), row_bytes, offset, stride
    character(kind=c_char) :: dim(32, 8)
  end type

  interface
    integer(c_int) function rb_connect(model, options, client) bind(c)
      import
      character(kind=c_char), intent(in) :: model(*)
      type(connect_options), intent(in) :: options
      integer(c_int64_t), intent(out) :: client
    end function
    integer(c_int) function rb_close(client) bind(c)
      import; integer(c_int64_t), value :: client
    end function
    integer(c_int) function rb_client_tensor(client, side, k, t) bind(c)
      import
      integer(c_int64_t), value :: client
      integer(c_int), value :: side, k
      type(tensor), intent(out) :: t
    end function
    integer(c_int) function rb_infer(client, rows, inputs, input_bytes, outputs, output_bytes, expires, timeout, request) bind(c)
      import
      integer(c_int64_t), value :: client, expires, timeout
      integer(c_int32_t), value :: rows
      type(c_ptr), intent(in) :: inputs(*), outputs(*)
      integer(c_int64_t), intent(in) :: input_bytes(*), output_bytes(*)
      integer(c_int64_t), intent(out) :: request
    end function
    integer(c_int) function rb_release(client, request) bind(c)
      import; integer(c_int64_t), value :: client, request
    end function
    type(c_ptr) function rb_error() bind(c)
      import
    end function
  end interface

  character(:), allocatable, save :: reason ! of the last failure in this module itself

contains

  !> Connects. Without a socket, the library chooses it; wait: also for a broker or model that is not there yet, for at most
  !> patience nanoseconds (10 s). window: rows in use at once, of all threads; without it 8 or fewer.
  subroutine ringbatch_connect(c, model, status, socket, wait, window, patience)
    type(ringbatch_client), intent(out) :: c
    character(*), intent(in) :: model
    integer, intent(out) :: status
    character(*), intent(in), optional :: socket
    logical, intent(in), optional :: wait
    integer, intent(in), optional :: window
    integer(int64), intent(in), optional :: patience
    type(connect_options) :: options
    character(kind=c_char, len=:), allocatable, target :: path
    options%size = int(c_sizeof(options), c_int32_t)
    if (present(socket)) then
      path = trim(socket) // c_null_char
      options%socket = c_loc(path)
    end if
    if (present(wait)) options%wait = merge(1, 0, wait)
    if (present(window)) options%window = window
    if (present(patience)) options%patience = patience
    reason = ''
    status = rb_connect(trim(model) // c_null_char, options, c%id)
  end subroutine

  subroutine ringbatch_close(c)
    type(ringbatch_client), intent(inout) :: c
    integer :: status
    status = rb_close(c%id)
    c%id = 0
  end subroutine

  !> Runs rows of a request. timeout: of the call, in nanoseconds; without it the call waits for the end.
  subroutine ringbatch_infer(c, rows, inputs, outputs, status, timeout)
    type(ringbatch_client), intent(in) :: c
    integer, intent(in) :: rows
    type(array), intent(in) :: inputs(:), outputs(:)
    integer, intent(out) :: status
    integer(int64), intent(in), optional :: timeout
    integer(c_int64_t) :: request, most
    most = -1
    if (present(timeout)) most = timeout
    reason = ''
    status = check(c, 0, inputs)
    if (status == ringbatch_ok) status = check(c, 1, outputs)
    if (status /= ringbatch_ok) return
    status = rb_infer(c%id, rows, inputs%at, inputs%bytes, outputs%at, outputs%bytes, 0_c_int64_t, most, request)
    if (status == ringbatch_timeout .and. request /= 0) most = rb_release(c%id, request)
  end subroutine

  !> Why the last call failed.
  function ringbatch_error() result(text)
    character(:), allocatable :: text
    character(kind=c_char), pointer :: c(:)
    integer :: n
    text = reason
    if (text /= '') return
    call c_f_pointer(rb_error(), c, [2048]) ! it ends with a zero byte before that
    do n = 1, findloc(c, c_null_char, 1) - 1
      text = text // c(n)
    end do
  end function

  integer function check(c, side, arrays) result(status)
    type(ringbatch_client), intent(in) :: c
    integer, intent(in) :: side
    type(array), intent(in) :: arrays(:)
    type(tensor) :: t
    integer :: k
    status = ringbatch_ok
    do k = 1, size(arrays)
      status = rb_client_tensor(c%id, side, k - 1, t)
      if (status /= ringbatch_ok) return
      if (arrays(k)%dtype /= t%dtype) then
        status = ringbatch_dtype
        reason = 'an array has elements of another type than its tensor'
      else if (.not. c_associated(arrays(k)%at)) then
        status = ringbatch_invalid
        reason = 'an array is not contiguous: pass a whole one'
      end if
      if (status /= ringbatch_ok) return
    end do
    if (rb_client_tensor(c%id, side, size(arrays), t) == ringbatch_ok) then
      status = ringbatch_invalid
      reason = 'the model has more tensors than arrays were given'
    end if
  end function

  type(array) function of_int8(x) result(a)
    integer(int8), target, intent(in) :: x(..)
    if (is_contiguous(x)) a%at = c_loc(x)
    a%bytes = size(x, kind=int64) * storage_size(x) / 8
    a%dtype = 3
  end function
  type(array) function of_int32(x) result(a)
    integer(int32), target, intent(in) :: x(..)
    if (is_contiguous(x)) a%at = c_loc(x)
    a%bytes = size(x, kind=int64) * storage_size(x) / 8
    a%dtype = 5
  end function
  type(array) function of_int64(x) result(a)
    integer(int64), target, intent(in) :: x(..)
    if (is_contiguous(x)) a%at = c_loc(x)
    a%bytes = size(x, kind=int64) * storage_size(x) / 8
    a%dtype = 6
  end function
  type(array) function of_real32(x) result(a)
    real(real32), target, intent(in) :: x(..)
    if (is_contiguous(x)) a%at = c_loc(x)
    a%bytes = size(x, kind=int64) * storage_size(x) / 8
    a%dtype = 9
  end function
  type(array) function of_real64(x) result(a)
    real(real64), target, intent(in) :: x(..)
    if (is_contiguous(x)) a%at = c_loc(x)
    a%bytes = size(x, kind=int64) * storage_size(x) / 8
    a%dtype = 10
  end function
  type(array) function of_text(x) result(a)
    character(*, c_char), target, intent(in) :: x(..)
    if (is_contiguous(x)) a%at = c_loc(x)
    a%bytes = size(x, kind=int64) * len(x)
    a%dtype = 11
  end function

  !> A text as a model takes it: UTF-8, and bytes 255 in place of the trailing blanks.
  elemental function ringbatch_text(text) result(t)
    character(*), intent(in) :: text
    character(len(text)) :: t
    t = trim(text) // repeat(char(255), len(text) - len_trim(text))
  end function

  !> A model's text with blanks at its end.
  elemental function ringbatch_blanks(text) result(t)
    character(*), intent(in) :: text
    character(len(text)) :: t
    integer :: n
    n = scan(text, char(255))
    t = text
    if (n > 0) t(n:) = ''
  end function
end module
